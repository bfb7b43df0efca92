"""Gates of many modules, whose memory does not grow with their heads: what is kept of a position are its state and, of a module,
two bytes.

The largest score of any head, added up over the window, is never below the mean that the gate goes by: where it stays below the
thresholds the gate is closed for certain. Everywhere else, which is seldom, the heads are asked again, from the states that were
kept, so decisions are those of :class:`NetworkGates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unbind_core.applying.gate_memory import SlotPlaces
from unbind_core.applying.gates import in_thresholds, of_rows, slice_or_index, windows_of
from unbind_core.applying.networks import Networks, in_grains
from unbind_core.applying.passes import Pass
from unbind_core.applying.places import Places
from unbind_core.module import UnbindModule

STEP = 16  # grains: what a bound is rounded up to
LONGEST = 127  # positions of a window over which sums of bounds, at most 129 steps each, differ by less than 2^14
# Positions in windows of undecided gates that are decided at a time, which bounds the memory that takes.
_TOGETHER = 1 << 16


class KeptGates:
    """As :class:`NetworkGates`, which has the arithmetic, for modules with windows of at most ``LONGEST`` positions."""

    def __init__(
        self,
        modules: Sequence[UnbindModule],
        networks: Networks,
        on: Tensor,
        halves: Sequence[int],
        states: int,
        width: int,
        device: torch.device,
    ) -> None:
        """``modules`` in the order of their windows, ``networks`` theirs; ``on`` bool [R,1,M]: which of them each row asks for;
        ``halves``: where each one's two bytes are among the layer's ``width`` columns seen as int16; ``states``: the first of the
        columns that hold the state.
        """
        self._on, self._networks, self.width, self._table_width = on, networks, networks.width, width
        self.blocks = networks.blocks
        self._d, self.units = modules[0].w.shape[1], torch.ones(len(modules), device=device)
        closes = [module.tau_close / module.tau if module.tau_close is not None else 1.0 for module in modules]
        self._close = torch.tensor(closes, device=device)
        self._window, self._first, self._least, self._hold = (
            torch.tensor(of, device=device)
            for of in zip(*((m.window, m.first, m.least, m.hold or m.window) for m in modules), strict=True)
        )
        groups = [windows_of(module) for module in modules]
        every = sorted(set(groups))
        self._windows = tuple((window, first) for window, first, _ in every)
        self._holds = tuple((hold, first) for _, first, hold in every) if any(m.hold for m in modules) else ()
        self._halves = slice_or_index(halves, device)
        ends = [sum(one <= wanted for one in groups) for wanted in every]
        self._by_window = [slice_or_index(halves[start:end], device) for start, end in pairwise((0, *ends))]
        columns = sorted({half // 2 for half in halves})
        place = {column: 2 * i for i, column in enumerate(columns)}
        at = [place[half // 2] + half % 2 for half in halves]
        self._at = None if at == list(range(2 * len(columns))) else torch.tensor(at, device=device)
        self._columns = torch.tensor(columns, device=device)
        own = torch.arange(states, states + self._d, device=device)
        self._states, self._both = slice(states, states + self._d), torch.cat((own, self._columns))

    def __call__(self, layer: int, states: Tensor, pass_: Pass, eased: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(e, open), each [B,T,M] or, of flat states [N,d], [N,M]; e is 0 behind closed gates. Raises ValueError for flat states
        without places. Where a gate may be open the device is waited for.
        """
        flat = states.detach().reshape(-1, self._d).float()
        places, real = SlotPlaces.of(states, pass_), pass_.real
        asked = of_rows(self._on, states, pass_.rows).expand(*states.shape[:-1], -1).reshape(len(flat), -1)
        bounds, before = self._bounds(flat), self._read(layer, places, places.before, [self._halves])
        if real is not None:
            real = real.reshape(-1, 1)
            bounds, asked = bounds.masked_fill_(~real, 0), asked & real
        sums, was_open = places.summed(bounds, before >> 1), (before & 1).bool()
        places.write(layer, self._both, torch.cat((flat.view(torch.int32), self._packed(sums << 1)), -1))
        at_most = self._at_most(layer, places, sums, self._windows, self._window)
        closes = at_most < self._close
        lowest = 1.0 if eased is None else torch.where(eased.view_as(closes), self._close, 1.0)  # that opens a gate
        if self._holds:
            closes &= self._at_most(layer, places, sums, self._holds, self._hold) < self._close
        gate = places.held(_there(at_most >= lowest, real), _there(closes, real), was_open) & asked
        e = torch.zeros_like(at_most)
        if bool(gate.any()):
            self._ask(layer, places, gate, self._window, e)
            opens, holding = gate & (e >= lowest), e
            if self._holds:
                holding = e.clone()
                self._ask(layer, places, gate & (e < self._close), self._hold, holding)
            gate = places.held(opens, _there(~gate | (holding < self._close), real), was_open) & asked
            e = torch.where(gate, holding, e)
            places.write(layer, self._columns, self._packed((sums << 1) | gate))
        return e.view(*states.shape[:-1], -1), gate.view(*states.shape[:-1], -1)

    def _bounds(self, states: Tensor) -> Tensor:
        """What each module's largest score at each state is at most, in steps, int32 [N,M]: one grain more than it is here, as the
        last bit of a product depends on what is multiplied beside it.
        """
        return in_grains(self._networks.largest(states)).add_(STEP) >> 4

    def _read(self, layer: int, places: Places, rows: Tensor, halves: Sequence[slice | Tensor]) -> Tensor:
        """What the modules have at ``rows``, as many for each part of ``halves``: int32 [n,M] of 16 bits."""
        found = places.read(layer, rows, self._table_width).view(torch.int16)
        count = len(rows) // len(halves)
        return torch.cat([found[i * count : (i + 1) * count, part] for i, part in enumerate(halves)], -1).int()

    def _packed(self, values: Tensor) -> Tensor:
        """The last 16 bits of ``values`` int32 [N,M] as the columns hold them, int32 [N,columns]."""
        halves = values.to(torch.int16)
        if self._at is not None:
            halves = halves.new_zeros((len(values), 2 * len(self._columns))).index_copy_(1, self._at, halves)
        return halves.view(torch.int32)

    def _at_most(
        self, layer: int, places: Places, sums: Tensor, lags: tuple[tuple[int, int], ...], window: Tensor
    ) -> Tensor:
        """No less than the mean over ``window`` int64 [M] at every state and of every module, FP32 [N,M]."""
        lagged = self._read(layer, places, places.behind(lags), self._by_window) >> 1
        steps = (sums - lagged << 17) >> 17  # 15 bits were kept, and the sign of their difference is in the first
        seen = (places.positions + 1).unsqueeze(-1) - self._first
        return _mean(STEP * steps, seen, window, self._least)

    def _ask(self, layer: int, places: Places, undecided: Tensor, windows: Tensor, means: Tensor) -> None:
        """Enter into ``means`` FP32 [N,M] those over ``windows`` int64 [M], where bool [N,M] says that they matter."""
        every = undecided.t().nonzero()  # by module
        for some in every.split(_TOGETHER // int(windows.max())) if len(every) else ():
            which, where = some.unbind(1)
            means[where, which] = self._exactly(layer, places, which, where, windows[which])

    def _exactly(self, layer: int, places: Places, which: Tensor, where: Tensor, window: Tensor) -> Tensor:
        """The mean over ``window`` int64 [n], FP32 [n], of module ``which`` int64 [n] at state ``where`` int64 [n], from the states
        that were kept; by module.
        """
        own = places.positions[where]
        sequence = where if places.sequences is None else places.sequences[where]
        first = self._first[which]
        at = own[:, None] - torch.arange(int(window.max()), device=own.device)
        inside = (at > (own - window)[:, None]) & (at >= first[:, None])
        span, sequences = int(own.max()) + 1, len(places.firsts)
        pairs = (which * sequences + sequence)[
            :, None
        ] * span + at  # a score that several windows hold is worked out once
        pairs, back = pairs[inside].unique(return_inverse=True)
        rows = places.rows(pairs % span, pairs // span % sequences)
        rows, of_row = rows.unique(return_inverse=True)
        states = places.read(layer, rows, self._table_width)[:, self._states].view(torch.float32)
        modules, counts = (pairs // (span * sequences)).unique_consecutive(return_counts=True)
        parts = zip(modules.tolist(), of_row.split(counts.tolist()), strict=True)
        grains = torch.cat([in_grains(self._networks.scores_of(module, states[part])) for module, part in parts])
        scores = grains.new_zeros((*inside.shape, grains.shape[1]))
        scores[inside] = grains[back]
        return _mean(scores.sum(1).amax(-1), own + 1 - first, window, self._least[which])


def _mean(sums: Tensor, seen: Tensor, window: Tensor, least: Tensor) -> Tensor:
    """The mean of so many grains in thresholds: 0 before the first position that counts."""
    counted = torch.minimum(seen, window)
    return in_thresholds(sums, torch.maximum(counted, least).float()).masked_fill_(counted <= 0, 0.0)


def _there(what: Tensor, real: Tensor | None) -> Tensor:
    return what if real is None else what & real
