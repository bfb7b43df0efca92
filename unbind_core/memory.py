"""What gates with memory keep of each sequence: head scores and the gate's state, by position.

The engine's slots own one :class:`GateMemory` beside their keys and values, ``attach`` makes one for each generation. What
stands at a position depends on the tokens up to it alone, so a prefix that is used again brings its gates along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class GateMemory:
    """Per layer FP16 [slots, length + 1, columns]; the last position is the bin for padding.

    Scores are multiples of 2^-10 of at most 2 in size and states are 0 or 1, all of which FP16 holds exactly.
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
                wider = torch.zeros((self.slots, self.length + 1, columns), dtype=torch.float16, device=self.device)
                if present is not None:
                    wider[:, :, : present.shape[2]] = present
            self._tables[layer] = present = wider
        return present

    def lengthen(self, length: int) -> None:
        """Make room for sequences of ``length`` positions, at least doubling, so that growth is rare."""
        if length <= self.length:
            return
        before, self.length = self.length, max(length, 2 * self.length)
        for layer, table in self._tables.items():
            with torch.inference_mode(False):
                longer = torch.zeros(
                    (self.slots, self.length + 1, table.shape[2]), dtype=table.dtype, device=self.device
                )
                longer[:, :before] = table[:, :before]
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

    def bytes_allocated(self) -> int:
        """Bytes of all tables."""
        return sum(table.numel() * table.element_size() for table in self._tables.values())


@dataclass(frozen=True)
class Places:
    """Where the rows of one forward pass stand in a memory.

    ``slots`` int64 [B]; ``positions`` int64 [B,T], each state's position in its sequence, ``memory.length`` for padding;
    ``starts`` int64 [B], the position of each row's first real state.
    """

    memory: GateMemory
    slots: Tensor
    positions: Tensor
    starts: Tensor

    def before(self, layer: int, columns: Tensor, count: int, width: int) -> Tensor:
        """FP16 [B,count,columns] of the ``count`` positions before each row's start; what is before position 0 is zero.

        ``columns`` int64, ``width`` the columns that the layer uses in all.
        """
        table = self.memory.table(layer, width)
        at = self.starts[:, None] + torch.arange(-count, 0, device=self.starts.device)
        found = table[self.slots[:, None, None], at.clamp(min=0)[:, :, None], columns]
        return found.masked_fill_((at < 0)[:, :, None], 0)

    def write(self, layer: int, columns: Tensor, values: Tensor) -> None:
        """Keep FP16 ``values`` [B,T,columns] at the rows' positions."""
        table = self.memory.table(layer, 0)
        table[self.slots[:, None, None], self.positions[:, :, None], columns] = values


class Columns:
    """Which columns of a layer's table belong to which module; freed ones are given out again."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[int, int]] = {}

    @property
    def width(self) -> int:
        """Columns in use, gaps included."""
        return max((end for _, end in self._taken.values()), default=0)

    def take(self, name: str, count: int) -> int:
        """The first of ``count`` columns in a row that are free; they are ``name``'s from now on."""
        start = 0
        for begin, end in sorted(self._taken.values()):
            if begin - start >= count:
                break
            start = end
        self._taken[name] = (start, start + count)
        return start

    def free(self, name: str) -> None:
        """Give a module's columns back."""
        self._taken.pop(name, None)
