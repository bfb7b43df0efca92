"""How near gates come to opening, and in which requests they open: kept where gates decide, worked out for many passes at once.

Nothing here waits for the device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

BOUNDARIES = (-1.0, 0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)  # of scores, in units of the threshold
_FIRST = 64  # columns of a table at first; it grows by doubling


class Look(NamedTuple):
    """Of a module: at how many positions its score was below each of ``BOUNDARIES``, at how many it was read, and in how many
    requests its gate was open at a position.
    """

    below: tuple[int, ...]
    positions: int
    requests: int

    def and_of(self, other: Look) -> Look:
        """Both together."""
        below = tuple(one + more for one, more in zip(self.below, other.below, strict=True))
        return Look(below, self.positions + other.positions, self.requests + other.requests)


NOTHING_SEEN = Look((0,) * len(BOUNDARIES), 0, 0)


def together(one: Mapping[str, Look], other: Mapping[str, Look]) -> dict[str, Look]:
    """By key, what both have seen."""
    return {key: one.get(key, NOTHING_SEEN).and_of(other.get(key, NOTHING_SEEN)) for key in one.keys() | other.keys()}


class Noted(NamedTuple):
    """What the gates of one part did in one pass, all ...,m wide: ``scores``, ``gate`` open at positions that count, and where a
    row ``asked`` for the module at one that counts (to be broadcast). ``requests``: int64 [B] or [N], see :class:`Requests`.
    """

    scores: Tensor
    gate: Tensor
    asked: Tensor
    requests: Tensor | None

    def flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """By position: [N,m] of each, and [N]."""
        shape = self.scores.shape
        requests = self.requests
        if requests is not None and len(shape) == 3:
            requests = requests.unsqueeze(1).expand(shape[:2]).reshape(-1)
        scores, gate, asked = (
            part.expand(shape).reshape(-1, shape[-1]) for part in (self.scores, self.gate, self.asked)
        )
        return scores, gate, asked, requests


def below(noted: Sequence[tuple[Tensor, Tensor, Tensor, Tensor | None]], bounds: Tensor) -> Tensor:
    """int64 [boundaries + 1, m]: positions whose score is below each of ``bounds`` FP32 [boundaries, m]; and all that count."""
    scores, asked = torch.cat([one[0] for one in noted]), torch.cat([one[2] for one in noted])
    return torch.stack([*(((scores < bound) & asked).sum(0) for bound in bounds), asked.sum(0)])


class Requests:
    """Tells ``most`` requests apart by a row of a table each, in which it stands which gates have been open for it.

    A row goes to another request when it was not used for longest.
    """

    def __init__(self, most: int, device: torch.device, settle: Callable[[], None]) -> None:
        """``settle`` has everything counted that still waits, before rows change hands."""
        self._most, self._device, self._settle = most, device, settle
        self.lock = threading.Lock()  # while the tables are in use
        self._rows: OrderedDict[Hashable, int] = OrderedDict()  # the one used last stands last
        self._free = list(range(most))
        self.opened = torch.zeros((most, _FIRST), dtype=torch.int32, device=device)  # 1 where a gate has been open
        self.counts = torch.zeros(_FIRST, dtype=torch.int64, device=device)
        self._last: tuple[tuple[Hashable, ...], Tensor] | None = None

    def rows(self, names: Sequence[Hashable]) -> Tensor:
        """The rows of these requests, int64 [B]; at most a quarter of all may be asked for at a time. Passes of several threads may
        ask.
        """
        key = tuple(names)
        while (found := self._known_or_new(key)) is None:
            self._make_room(len(key))
        return found

    def _known_or_new(self, key: tuple[Hashable, ...]) -> Tensor | None:
        """None where there may not be rows enough."""
        with self.lock:
            if self._last is not None and self._last[0] == key:
                return self._last[1]
            if len(self._free) < len(key):
                return None
            for name in key:
                if name not in self._rows:
                    self._rows[name] = self._free.pop()
                self._rows.move_to_end(name)
            found = torch.tensor([self._rows[name] for name in key], device=self._device)
            self._last = key, found
            return found

    def _make_room(self, wanted: int) -> None:
        self._settle()
        with self.lock, torch.inference_mode(False):
            if len(self._free) >= wanted:
                return  # another thread has made it meanwhile: what is taken now may be of a pass that runs
            gone = [self._rows.popitem(last=False)[1] for _ in range(min(len(self._rows), self._most // 2))]
            self.opened[torch.tensor(gone, device=self._device)] = 0
            self._free += gone
            self._last = None

    def take(self, slots: Tensor, rows: Tensor, gate: Tensor) -> None:
        """Gates bool [N,m] of the modules in ``slots`` int64 [m] at positions of the requests in ``rows`` int64 [N]."""
        hits = torch.zeros((self._most, len(slots)), dtype=torch.int32, device=self._device)
        hits.index_add_(0, rows, gate.int())
        with self.lock:
            before = self.opened.index_select(1, slots)
            now = before | (hits > 0)
            self.counts.index_add_(0, slots, (now - before).sum(0))
            self.opened.index_copy_(1, slots, now)

    def reach(self, slots: int) -> None:
        """Have columns for so many slots of modules."""
        with self.lock:
            while self.opened.shape[1] < slots:
                with torch.inference_mode(False):
                    self.opened = functional.pad(self.opened, (0, self.opened.shape[1]))
                    self.counts = functional.pad(self.counts, (0, len(self.counts)))

    def read(self) -> list[int]:
        """By slot, the requests in which its gate was open; waits for the device."""
        with self.lock:
            counts = self.counts.clone()
        return [int(count) for count in counts.tolist()]
