"""What gates with memory keep of each sequence by position: running sums, gates' states, and for many modules the state itself.

The engine's slots own one :class:`GateMemory` beside their keys and values, ``attach`` makes one for each generation. What
stands at a position depends on the tokens up to it alone, so a prefix that is used again brings its gates along.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from unbind_core.applying.passes import Pass
from unbind_core.applying.places import WHOLE_ROW, Addresses, Places
from unbind_core.errors import UnbindError
from unbind_core.running.device import free_bytes


class GateMemory:
    """Per layer int32 [slots, length + 2, columns]: zeros in front of position 0, the positions, the bin for padding.

    Scores come in whole grains of at most 2,048, so sums of them are exact; where a sum overflows, differences of sums still are.
    """

    def __init__(self, slots: int, length: int, device: torch.device | str = "cpu") -> None:
        """Nothing is allocated before a gate writes; ``length`` positions a sequence."""
        self.slots, self.length, self.device = slots, length, torch.device(device)
        self._tables: dict[int, Tensor] = {}

    def table(self, layer: int, columns: int) -> Tensor:
        """The layer's table, grown to at least ``columns`` columns."""
        present = self._tables.get(layer)
        if present is None or present.shape[2] < columns:
            with torch.inference_mode(False):  # written inside and outside inference mode
                wider = torch.zeros((self.slots, self.length + 2, columns), dtype=torch.int32, device=self.device)
                if present is not None:
                    wider[:, :, : present.shape[2]] = present
            self._tables[layer] = present = wider
        return present

    def reserve(self, columns: Mapping[int, int]) -> None:
        """Allocate, by layer, tables of at least so many columns. Raises UnbindError where they do not fit the free memory."""
        wanted = 4 * self.slots * (self.length + 2) * sum(columns.values())
        if wanted - self.bytes_allocated() > (free := free_bytes(self.device)):
            raise UnbindError(
                f"the gates of the modules would take {wanted / 1024**3:.2f} GiB of memory over {self.slots} slots of "
                f"{self.length} positions, and {free / 1024**3:.2f} GiB are free; load fewer modules, or serve with fewer "
                "--max-slots or a lower --max-model-len"
            )
        for layer, count in columns.items():
            self.table(layer, count)

    def lengthen(self, length: int) -> None:
        """Make room for sequences of ``length`` positions, at least doubling, so that growth is rare."""
        if length <= self.length:
            return
        before, self.length = self.length, max(length, 2 * self.length)
        for layer, table in self._tables.items():
            with torch.inference_mode(False):
                longer = torch.zeros(
                    (self.slots, self.length + 2, table.shape[2]), dtype=table.dtype, device=self.device
                )
                longer[:, : before + 1] = table[:, : before + 1]
            self._tables[layer] = longer

    def reorder(self, rows: Tensor) -> None:
        """Slot i goes on with what slot ``rows[i]`` holds, as beam search reorders its cache; int64, a slot for each entry."""
        self.slots = len(rows)
        for layer, table in self._tables.items():
            self._tables[layer] = table.index_select(0, rows.to(self.device))

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Forget a slot's sequence."""
        for table in self._tables.values():
            table[slot].zero_()

    @torch.inference_mode()
    def copy(self, source: int, target: int, count: int) -> None:
        """Have the first ``count`` positions of one slot in another as well."""
        for table in self._tables.values():
            table[target, : count + 1] = table[source, : count + 1]

    def bytes_allocated(self) -> int:
        """Bytes of all tables."""
        return sum(table.numel() * table.element_size() for table in self._tables.values())


class SlotPlaces(Places):
    """The rows of a batch [B,T], or flat sequences [N], in the slots of a memory."""

    def __init__(
        self, memory: GateMemory, slots: Tensor, positions: Tensor, starts: Tensor, firsts: Tensor | None = None
    ) -> None:
        """``slots`` int64 [S], of each row or sequence; ``positions`` int64 [S,T] or [N], each state's position in its sequence,
        ``memory.length`` for padding; ``starts`` int64 [S], the position of each one's first real state; ``firsts`` int64 [S],
        where in [N] each begins, None for rows.
        """
        if firsts is None:
            firsts = torch.arange(len(slots), device=positions.device) * positions.shape[1]
        super().__init__(positions.reshape(-1), firsts, starts)
        self._memory, self._slots = memory, slots
        self._first = slots * (memory.length + 2) + 1  # the row of each slot's position 0; the one in front is zeros

    @classmethod
    def afresh(cls, batch: int, length: int, real: Tensor | None, device: torch.device) -> SlotPlaces:
        """Whole sequences from their beginning, in a memory of their own; ``real`` bool [B,T] is false at padding."""
        positions = torch.arange(length, device=device).expand(batch, length)
        if real is not None:
            positions = torch.where(real, real.cumsum(1) - 1, length)
        first = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(GateMemory(batch, length, device), torch.arange(batch, device=device), positions, first)

    @classmethod
    def of(cls, states: Tensor, pass_: Pass) -> Places:
        """The pass's own places; without them the rows of a batch are whole sequences, and flat states raise ValueError."""
        if pass_.places is not None:
            return pass_.places
        if states.dim() == 2:
            raise ValueError("flat states [N,d] of sequences need places; gates with memory do not take single states")
        return cls.afresh(states.shape[0], states.shape[1], pass_.real, states.device)

    def rows(self, positions: Tensor, sequences: Tensor | None) -> Tensor:
        """Of the layer's table seen as [slots x (length + 2), columns]."""
        return positions + (self._first if sequences is None else self._first.index_select(0, sequences))

    def addresses(self, layer: int, width: int) -> Addresses | None:
        """See :meth:`Places.addresses`: a slot is one page, zeros and bin included."""
        size = self._memory.length + 2
        return Addresses(self._table(layer, width), self.positions, 0, self._slots.unsqueeze(1), size, False)

    def _table(self, layer: int, width: int) -> Tensor:
        table = self._memory.table(layer, width)
        return table.view(-1, table.shape[2])

    def read(self, layer: int, rows: Tensor, width: int, part: slice = WHOLE_ROW) -> Tensor:
        """See :meth:`Places.read`."""
        return self._table(layer, width)[:, part].index_select(0, rows)

    def write(self, layer: int, columns: Tensor | slice, values: Tensor) -> None:
        """See :meth:`Places.write`."""
        rows = self._table(layer, 0)
        if isinstance(columns, slice):
            rows[:, columns].index_copy_(0, self.here, values)
        else:
            rows[self.here.unsqueeze(1), columns] = values


class Columns:
    """Which columns of a table belong to what: a module, or by its number a layer's states; freed ones are given out again."""

    def __init__(self) -> None:
        self.width = 0  # columns in use, gaps included
        self._taken: dict[str | int, tuple[int, int]] = {}  # the first, and how many
        self._gaps: list[tuple[int, int]] = []  # as well, rising
        self._halves: dict[str | int, int] = {}
        self._spare: list[int] = []  # halves whose other half is taken, a heap

    def take(self, owner: str | int, count: int) -> int:
        """The first of ``count`` columns in a row that are free; they are ``owner``'s from now on."""
        start = self._take(count)
        self._taken[owner] = start, count
        return start

    def take_half(self, owner: str | int) -> int:
        """Half a column, counted in halves: ``owner``'s from now on."""
        if self._spare:
            half = heappop(self._spare)
        else:
            half = 2 * self._take(1)
            heappush(self._spare, half + 1)
        self._halves[owner] = half
        return half

    def free(self, owner: str | int) -> None:
        """Give back what was taken."""
        if owner in self._taken:
            self._give(*self._taken.pop(owner))
        elif owner in self._halves:
            half = self._halves.pop(owner)
            if half ^ 1 in self._spare:
                self._spare.remove(half ^ 1)
                heapify(self._spare)
                self._give(half // 2, 1)
            else:
                heappush(self._spare, half)

    def _take(self, count: int) -> int:
        for i, (start, room) in enumerate(self._gaps):
            if room >= count:
                self._gaps[i : i + 1] = [(start + count, room - count)] if room > count else []
                return start
        self.width += count
        return self.width - count

    def _give(self, start: int, count: int) -> None:
        gaps: list[tuple[int, int]] = []
        for first, room in sorted([*self._gaps, (start, count)]):
            if gaps and sum(gaps[-1]) == first:
                gaps[-1] = gaps[-1][0], gaps[-1][1] + room
            else:
                gaps.append((first, room))
        if sum(gaps[-1]) == self.width:
            self.width = gaps.pop()[0]
        self._gaps = gaps
