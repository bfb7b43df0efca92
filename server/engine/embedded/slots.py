"""Keys and values of every running request, in fixed slots that this cache owns.

A transformers ``Cache`` whose layers write to given (slot, position) places and hand the model the keys of those slots.
The runner places each pass's states before it and masks what a state must not see. A placement belongs to the thread that
runs the pass, so passes over different slots can run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Run:
    """States of a pass from ``first`` on, ``steps`` of each of ``rows`` sequences, which live in as many neighbouring slots from
    ``slot``. ``length``: how many positions they may look at; of more steps than one all of them end there.
    """

    first: int
    rows: int
    steps: int
    slot: int
    length: int


@dataclass(frozen=True)
class Placement:
    """Where the states of one forward pass live, sequence after sequence: [1,N], or [N,1] where each is one of its own.

    ``slots`` and ``positions`` int64, of that shape: where new keys are written; ``length``: how many positions, from 0, the
    furthest may look at. ``in_place``: attention reads the storages.
    """

    slots: Tensor
    positions: Tensor
    length: int
    runs: tuple[Run, ...]
    in_place: bool
    _lines: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def lines(self, heads: int, length: int) -> Tensor:
        """int64 [heads*N]: where new keys go in a storage seen as lines of one head's numbers; made once for all layers."""
        found = self._lines.get((heads, length))
        if found is None:
            first = (self.slots[:, None] * heads + torch.arange(heads, device=self.slots.device)[:, None]) * length
            found = self._lines[heads, length] = (first + self.positions[:, None]).flatten()
        return found

    @classmethod
    def of(
        cls, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], positions: Tensor, in_place: bool
    ) -> Placement:
        """Sequences alike make the fewest runs in the order of their slots."""
        runs: list[Run] = []
        first = 0
        for slot, start, count in zip(slots, starts, counts, strict=True):
            end, last = start + count, runs[-1] if runs else None
            follows = last and (slot, count) == (last.slot + last.rows, last.steps)
            if last and follows and (count == 1 or end == last.length):
                runs[-1] = replace(last, rows=last.rows + 1, length=max(last.length, end))
            else:
                runs.append(Run(first, 1, count, slot, end))
            first += count
        own = torch.tensor(slots).repeat_interleave(torch.tensor(counts)).view_as(positions).to(positions.device)
        return cls(own, positions, max(run.length for run in runs), tuple(runs), in_place)


_placed: ContextVar[Placement | None] = ContextVar("placement", default=None)


def placement() -> Placement | None:
    """Where this thread's forward pass is placed; None outside of one."""
    return _placed.get()


@contextmanager
def placed(rows: Placement) -> Iterator[None]:
    """For one forward pass of this thread, states are where ``rows`` says. Does not nest."""
    if placement() is not None:
        raise RuntimeError("placed() does not nest: one forward pass has one placement")
    token = _placed.set(rows)
    try:
        yield
    finally:
        _placed.reset(token)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, each [slots, heads, max_length, head size]."""

    is_sliding = False

    def __init__(self, slots: int, max_length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots, self.max_length = slots, max_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the first write, when shapes, dtype and device are known; zeros, as a masked NaN would spread."""
        self.keys = self._storage(key_states)
        self.values = self._storage(value_states)
        self.is_initialized = True

    def _storage(self, like: Tensor) -> Tensor:
        return like.new_zeros((self.slots, like.shape[1], self.max_length, like.shape[3]))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B,H,T,D], B or T being 1, to the states' places; return keys and values [B,H,length,D] of the rows' slots, of a
        pass [1,N] those of its only sequence; or the whole storages, for attention that reads in place.
        """
        if (at := placement()) is None:
            raise RuntimeError("a slot cache is only written inside placed()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._exchange(self.keys, key_states, at), self._exchange(self.values, value_states, at)

    @staticmethod
    def _exchange(storage: Tensor | None, new: Tensor, at: Placement) -> Tensor:
        assert storage is not None
        size = storage.shape[3]
        lines = at.lines(storage.shape[1], storage.shape[2])
        storage.view(-1, size).index_copy_(0, lines, new.reshape(-1, size))  # a third of the time of indexing by two
        if at.in_place:
            return storage
        if len(at.runs) == 1:
            (run,) = at.runs
            return storage[run.slot : run.slot + run.rows, :, : at.length]
        return storage[at.slots[:, 0], :, : at.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The model builds no mask of its own: the runner's is complete."""
        at = placement()
        return (at.length if at else query_length), 0

    def get_seq_length(self) -> int:
        """Rows differ in length and bring their positions, so there is no one answer; 0 keeps models from guessing."""
        return 0

    def get_max_length(self) -> int:
        """Positions a slot has."""
        return self.max_length


class SlotCache(Cache):
    """The layers' storages."""

    def __init__(self, layers: int, slots: int, max_length: int) -> None:
        self.slot_layers = [SlotLayer(slots, max_length) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot after a failed step, so that no NaN outlives its request."""
        for layer in self.slot_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys[slot].zero_()
                layer.values[slot].zero_()

    @torch.inference_mode()
    def copy(self, source: int, target: int, count: int) -> None:
        """Have the first ``count`` positions of one slot in another as well."""
        for layer in self.slot_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys[target, :, :count] = layer.keys[source, :, :count]
                layer.values[target, :, :count] = layer.values[source, :, :count]
