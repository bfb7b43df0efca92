"""Positions evaluated and gates open, counted where gates decide without slowing a step down, and read when somebody asks."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from unbind_core.applying.looks import BOUNDARIES, Look, Noted, Requests, below

PHASES = ("prefill", "decode")
TOGETHER = 64  # passes of which open gates are added up at once
MOST_WAITING = 1 << 20  # scores or gates that wait to be looked at


class Count(NamedTuple):
    """What the gates of one detector kind did at one layer of one pass, not added up yet: nothing waits for the device.

    ``gate`` bool [...,m]: open, at positions that count. ``asked`` bool, as wide or to be broadcast: where a row asks for the
    module at a position that counts. ``whole``: all positions count, of all rows of the selection alike.
    """

    gate: Tensor
    asked: Tensor
    whole: bool

    def totals(self) -> tuple[Tensor, Tensor]:
        """Positions evaluated and gates open, int64 [m] each."""
        every = tuple(range(self.gate.dim() - 1))
        return self.asked.expand(self.gate.shape).sum(every), self.gate.sum(every)


class Tally:
    """What one part has counted since it was made, by phase; added up when somebody asks, as a step has better things to do."""

    def __init__(
        self, slots: Tensor, on: Tensor, units: Tensor | None = None, requests: Requests | None = None
    ) -> None:
        """``slots`` int64 [m] of the modules; ``on`` bool [R,1,m], which of them each row asks for. ``units`` FP32 [m]: the
        thresholds in the numbers that scores come in, None where nobody looks at those; ``requests``: those that are told apart.
        """
        self._slots, self._on = slots, on
        self._requests, self._noted, self._waiting = requests, list[Noted](), 0
        self._bounds = self._below = None
        if units is not None:
            self._bounds = torch.tensor(BOUNDARIES, device=units.device).unsqueeze(1) * units
            self._below = units.new_zeros((len(BOUNDARIES) + 1, len(units)), dtype=torch.int64)
        self._lock = threading.Lock()  # two passes may use one selection at a time
        self._passes = [0] * len(PHASES)  # positions at which all rows were evaluated
        self._evaluated = [on.new_zeros(on.shape[2], dtype=torch.int64) for _ in PHASES]  # positions beside those
        self._open = [torch.zeros_like(evaluated) for evaluated in self._evaluated]
        self._gates: list[list[Tensor]] = [[] for _ in PHASES]  # of passes that are not added up yet, [n,m]
        self._counting = [0] * len(PHASES)  # how many those are
        self._bins: Tensor | None = None

    def bins(self, phase: int) -> Tensor:
        """int64 [m,boundaries + 2], to be counted in on the device: positions evaluated, by how many boundaries their scores reach,
        and open gates.
        """
        with self._lock:
            if self._bins is None:
                with torch.inference_mode(False):
                    self._bins = self._on.new_zeros(
                        (len(PHASES), self._on.shape[2], len(BOUNDARIES) + 2), dtype=torch.int64
                    )
            return self._bins[phase]

    def add(self, phase: int, count: Count) -> None:
        """Take in what one pass did."""
        if count.whole:
            self._add_whole(phase, count.gate)
            return
        evaluated, opened = count.totals()
        with self._lock:
            self._evaluated[phase].add_(evaluated)
            self._open[phase].add_(opened)

    def _add_whole(self, phase: int, gate: Tensor) -> None:
        """Gates of a batch whose row i is row i of the selection, or whose rows all are its only one."""
        with self._lock:
            self._passes[phase] += gate.numel() // self._on.numel()
            self._gates[phase].append(gate.reshape(-1, gate.shape[-1]))
            self._counting[phase] += gate.numel()
            if len(self._gates[phase]) == TOGETHER or self._counting[phase] > MOST_WAITING:
                self._add_up(phase)

    def note(self, scores: Tensor, gate: Tensor, asked: Tensor, requests: Tensor | None) -> None:
        """Keep what is looked at later (:class:`Noted`)."""
        if self._bounds is None:
            return
        with self._lock:
            self._noted.append(Noted(scores.detach(), gate, asked, requests))
            self._waiting += scores.numel()
            if len(self._noted) == TOGETHER or self._waiting > MOST_WAITING:
                self._look()

    def look(self) -> None:
        """Look at what was noted."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        if not self._noted or self._below is None or self._bounds is None:
            return
        flat = [noted.flat() for noted in self._noted]
        self._noted, self._waiting = [], 0
        self._below.add_(below(flat, self._bounds))
        told = [(rows, gate) for _, gate, _, rows in flat if rows is not None]
        if told and self._requests is not None:
            self._requests.take(
                self._slots, torch.cat([rows for rows, _ in told]), torch.cat([gate for _, gate in told])
            )

    def _add_up(self, phase: int) -> None:
        if gates := self._gates[phase]:
            self._open[phase].add_(torch.cat(gates).sum(0))
            gates.clear()
            self._counting[phase] = 0

    def add_to(self, evaluated: Tensor, opened: Tensor, looks: Tensor) -> None:
        """Add what was counted to int64 [phases,slots] tables, and what was looked at to [boundaries + 1, slots]."""
        self.look()
        if self._below is not None:
            looks.index_add_(1, self._slots, self._below)
        if self._bins is not None:
            reached, gates = self._bins[:, :, :-1], self._bins[:, :, -1]
            evaluated.index_add_(1, self._slots, reached.sum(2))
            opened.index_add_(1, self._slots, gates)
            if self._below is not None:  # a score that reaches fewer boundaries is below those that follow
                looks.index_add_(1, self._slots, reached.sum(0).cumsum(1).t())
        for phase, passes in enumerate(self._passes):
            with self._lock:
                self._add_up(phase)
            evaluated[phase].index_add_(0, self._slots, self._evaluated[phase] + self._on.sum((0, 1)) * passes)
            opened[phase].index_add_(0, self._slots, self._open[phase])


class Counters:
    """Positions evaluated and gates open by slot of a module; a slot is never given to another."""

    def __init__(self, device: torch.device, requests: int = 0) -> None:
        """``requests``: how many are told apart; 0: nobody looks at scores and requests."""
        self._lock = threading.Lock()
        self._evaluated = torch.zeros((len(PHASES), 64), dtype=torch.int64, device=device)
        self._open = torch.zeros_like(self._evaluated)
        self._looks = self._evaluated.new_zeros((len(BOUNDARIES) + 1, 64))
        self.requests = Requests(requests, device, self._look) if requests else None
        self._live: list[Tally] = []
        self._ended: deque[Tally] = deque()  # nobody counts in them any more
        self.used = 0

    def new_slot(self) -> int:
        """The next free slot; the tables grow by doubling."""
        with self._lock:
            if self.used == self._open.shape[1]:
                with torch.inference_mode(False):  # else these could not be counted in outside inference mode
                    self._evaluated = functional.pad(self._evaluated, (0, self.used))
                    self._open = functional.pad(self._open, (0, self.used))
                    self._looks = functional.pad(self._looks, (0, self.used))
            self.used += 1
            if self.requests is not None:
                self.requests.reach(self.used)
            return self.used - 1

    def watch(self, counting: object, tallies: Sequence[Tally]) -> None:
        """Count these in; ``counting`` is what counts in them, for as long as it lives."""
        with self._lock:
            self._settle()
            self._live += tallies
        weakref.finalize(counting, self._ended.extend, tallies).atexit = False

    def _settle(self) -> None:
        """Take over what those have counted that have ended."""
        while self._ended:
            tally = self._ended.popleft()
            self._live.remove(tally)
            tally.add_to(self._evaluated, self._open, self._looks)

    def _look(self) -> None:
        with self._lock:
            for tally in self._live:
                tally.look()

    def _total(self) -> tuple[Tensor, Tensor, Tensor]:
        with self._lock:
            self._settle()
            evaluated, opened, looks = self._evaluated.clone(), self._open.clone(), self._looks.clone()
            for tally in self._live:
                tally.add_to(evaluated, opened, looks)
        return evaluated, opened, looks

    def read(self) -> list[list[tuple[int, int]]]:
        """Per phase and slot (evaluated, open); waits for the device."""
        evaluated, opened, _ = self._total()
        return [[(int(e), int(o)) for e, o in phase] for phase in torch.stack((evaluated, opened), dim=2).tolist()]

    def looked(self) -> list[Look]:
        """Per slot; waits for the device. Empty where nobody looks."""
        if self.requests is None:
            return []
        table = self._total()[2].t().tolist()
        opened = self.requests.read()
        return [Look(tuple(row[:-1]), row[-1], requests) for row, requests in zip(table, opened, strict=False)]
