"""How gates decide: from the states of one layer to an activation and an open or closed gate for each module.

One class a detector kind, each with its modules' tensors stacked; the bank (``bank.py``) turns what they say into an edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from unbind_core.applying.gate_memory import SlotPlaces
from unbind_core.applying.networks import GRAIN, Block, Networks, in_grains
from unbind_core.applying.passes import Pass
from unbind_core.module import UnbindModule


def activation(states: Tensor, w: Tensor, s_ref: Tensor) -> Tensor:
    """a = relu(h w' - s_ref) in FP32 (Section 4.1, eq. (5)): states [...,d] of any dtype, w [M,d], s_ref [M] -> [...,M].

    Thresholds are computed through this same function, so that a boundary at deployment is the boundary at calibration.
    """
    return functional.linear(states.float(), w, -s_ref).relu_()


def windowed(scores: Tensor, window: int, lengths: Tensor, first: int = 0, least: int = 1) -> Tensor:
    """e_t: the mean of the scores over the last ``window`` positions of a whole sequence, fewer at its beginning.

    Positions before ``first`` are not counted, and a sum over fewer than ``least`` is divided by ``least``.
    scores [B,T,K], padding last in each row; ``lengths`` int64 [T] or [B,T], how many positions a sequence has up to and with each.
    """
    if (window, first, least) == (1, 0, 1):
        return scores
    # FP32 would be exact for 8,192 positions only
    sums = functional.pad(_from(first, scores, 1), (0, 0, window, 0)).cumsum(1, dtype=torch.float64)
    over = (lengths - first).clamp(max=window).clamp(min=least)
    return ((sums[:, window:] - sums[:, :-window]) / over.unsqueeze(-1)).to(scores.dtype)


def in_thresholds(sums: Tensor, counted: Tensor) -> Tensor:
    """e, FP32: the mean of so many scores in units of the threshold, from the sum of their grains."""
    return sums / (counted * GRAIN)


def _from(first: int, scores: Tensor, dim: int) -> Tensor:
    """The scores with zeros at positions before ``first``."""
    if first == 0:
        return scores
    early = torch.arange(scores.shape[dim], device=scores.device) < first
    return scores.masked_fill(early.unsqueeze(-1), 0)


def decided(scores: Tensor, s_ref: float, tau: float, window: int, first: int = 0, least: int = 1) -> Tensor:
    """e [T] of a whole sequence's scores f [T,K], as :class:`NetworkGates` has it under these thresholds: it opens where e >= 1.

    Clipped, rounded and added up as there. There s_ref and tau are part of the product that gives the scores, whose last bit may
    differ: a score may so come out one grain higher or lower.
    """
    grains = _from(first, in_grains((scores - s_ref) * (GRAIN / tau)), 0)
    sums = functional.pad(grains, (0, 0, window, 0)).cumsum(0, dtype=torch.int32)
    seen = torch.arange(1 - first, len(scores) + 1 - first, device=scores.device).clamp(max=window).clamp(min=least)
    return in_thresholds((sums[window:] - sums[:-window]).amax(-1), seen.float())


def of_rows(table: Tensor, states: Tensor, rows: Tensor | None) -> Tensor:
    """Entries of a [R,1,M] table, R rows or one for all, for every state: [B,1,M] for states [B,T,d], [N,M] for states [N,d]."""
    chosen = table if rows is None or len(table) == 1 else table.index_select(0, rows)
    return chosen if states.dim() == 3 else chosen.squeeze(1)


class FisherGates:
    """The paper's gates, without memory: open where a >= tau, and acting in proportion to a."""

    def __init__(
        self, modules: Sequence[UnbindModule], tensors: Sequence[Mapping[str, Tensor]], on: Tensor, device: torch.device
    ) -> None:
        """Stack w FP32 [M,d], s_ref and tau FP32 [M]; ``tensors`` are the modules' own, on ``device``; ``on`` bool [R,1,M]: which
        of them each row asks for.
        """
        self._w = torch.stack([own["w"] for own in tensors]).t()
        self._minus_s_ref = -torch.tensor([module.s_ref for module in modules], device=device)
        taus = [module.tau for module in modules]
        self.units = torch.tensor(taus, device=device)  # thresholds in the numbers that activations come in
        self._tau = torch.where(on, self.units, torch.nan)  # which nothing reaches
        self._at_zero = min(taus) == 0  # else an open gate's a is above 0 anyway
        self.width = len(modules)
        self.blocks: tuple[Block, ...] = ()

    def __call__(self, layer: int, states: Tensor, pass_: Pass, eased: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(a as :func:`activation` gives it, but below 0 where a gate is closed; a >= tau), each [...,M]. These gates close where
        they do not open, so none is ``eased``.
        """
        flat = states.reshape(-1, states.shape[-1]).float()
        a = torch.addmm(self._minus_s_ref, flat, self._w)  # the product of functional.linear, without its way there
        if self._at_zero:
            a = a.relu_()
        a = a.view(*states.shape[:-1], -1)
        return a, a >= of_rows(self._tau, states, pass_.rows)


class NetworkGates:
    """Gates whose detector is a small network with one head or more, a window and two thresholds; M modules in one product.

    z_k = (f_k(h) - s_ref) / tau, clipped to +-2 and rounded to 1/1024; e = max over heads of the mean of z over the window, as
    :func:`windowed` takes it; opens at e >= 1, closes below tau_close / tau, and with a longer window ``hold`` only where the mean
    over that is below it too, which then stands for e. An open gate acts with kappa whatever e is.
    """

    def __init__(
        self,
        modules: Sequence[UnbindModule],
        networks: Networks,
        on: Tensor,
        columns: Sequence[int],
        width: int,
        device: torch.device,
    ) -> None:
        """``modules`` in the order of their windows, ``networks`` theirs; ``on`` bool [R,1,M]: which of them each row asks for;
        ``columns``: where each one's columns (its heads', then one for its state) begin among the layer's ``width``.
        """
        self._on = None if bool(on.all()) else on
        self.units = torch.ones(len(modules), device=device)
        self._networks, counts, self._most = networks, networks.counts, networks.most
        # No head is read that is not there.
        starts = [sum(counts[:i]) for i in range(len(counts))]
        # Where each of the M x most heads is among those there are, or for one that is not there its module's first.
        self._spread: Tensor | None = None
        if min(counts) < self._most:
            each = zip(starts, counts, strict=True)
            every = [start + k * (k < count) for start, count in each for k in range(self._most)]
            self._spread = torch.tensor(every, device=device)
        groups = [windows_of(module) for module in modules]
        closes = [module.tau_close / module.tau if module.tau_close is not None else 1.0 for module in modules]
        self.close = torch.tensor(closes, device=device)
        own = zip(columns, counts, modules, strict=True)
        # Of each module its first column, heads, window, first, least and hold.
        self.described = [
            (column, heads, one.window, one.first, one.least, one.hold or one.window) for column, heads, one in own
        ]

        together = sorted(set(groups))
        self._windows = tuple((window, start) for window, start, _ in together)
        holds = any(module.hold for module in modules)
        self._holds = tuple((hold, start) for _, start, hold in together) if holds else ()
        first, least = (
            torch.tensor([getattr(module, name) for module in modules], dtype=torch.float32)
            for name in ("first", "least")
        )
        self._over, self._over_hold = (
            _divisors([group[at] for group in groups], first, least).to(device) for at in (0, 2)
        )
        own_columns = [range(column, column + count) for column, count in zip(columns, counts, strict=True)]
        by_window = [
            [c for own, group in zip(own_columns, groups, strict=True) if group == wanted for c in own]
            for wanted in together
        ]
        in_order, states = [c for part in by_window for c in part], [own.stop for own in own_columns]
        self._columns, self._states, self._both = (
            slice_or_index(part, device) for part in (in_order, states, in_order + states)
        )
        # What is read of a row is from the first of them to the last, whatever other modules have there.
        first_column = min(in_order)
        self._part = slice(first_column, max(states) + 1)
        self._read_columns, self._read_states, *self._read_by_window = (
            slice_or_index([column - first_column for column in part], device)
            for part in (in_order, states, *by_window)
        )
        self.width, self.table_width, self.blocks = networks.width, width, networks.blocks

    def __call__(self, layer: int, states: Tensor, pass_: Pass, eased: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(e, open), each [B,T,M] or, of flat states [N,d], [N,M]. ``eased``, of the same shape: where a gate opens already at the
        score under which it would close. Without places in the pass the rows of a batch are whole
        sequences. Raises ValueError for flat states without places.
        """
        states = states.detach()  # open or closed has no gradient, and a memory must hold no graph
        places, real = SlotPlaces.of(states, pass_), pass_.real
        z = in_grains(self._networks.scores(states.reshape(-1, states.shape[-1])))  # [N,heads]
        if real is not None:
            real = real.reshape(-1, 1)
            z = z.masked_fill_(~real, 0)  # whatever padding holds, NaN included
        lags = (*self._windows, *self._holds)
        if places.alone:  # all that one position needs is there already: read at once, written at once
            found = places.read(layer, places.behind(((1, 0), *lags)), self.table_width, self._part)
            before, lagged = found[: len(z)], found[len(z) :]
            sums = z.add_(before[:, self._read_columns])
        else:
            before = places.read(layer, places.before, self.table_width, self._part)
            sums = places.summed(z, before[:, self._read_columns])
            places.write(layer, self._columns, sums)
            lagged = places.read(layer, places.behind(lags), self.table_width, self._part)
        near, far = lagged[: len(z) * len(self._windows)], lagged[len(z) * len(self._windows) :]
        e = self._means(sums, near, self._over, places.positions)
        was_open = before[:, self._read_states] > 0
        opens, closes = e >= 1, e < self.close
        if eased is not None:
            opens |= (e >= self.close) & eased.view_as(opens)
        if self._holds:
            holding = self._means(sums, far, self._over_hold, places.positions)
            below, closes = closes, closes & (holding < self.close)
        if real is not None:
            opens, closes = opens & real, closes & real
        held = places.held(opens, closes, was_open)
        if self._holds:
            e = torch.where(held & below, holding, e)
        if places.alone:
            places.write(layer, self._both, torch.cat((sums, held.int()), -1))
        else:
            places.write(layer, self._states, held.int())
        e, held = (part.view(*states.shape[:-1], -1) for part in (e, held))
        return e, held if self._on is None else held & of_rows(self._on, states, pass_.rows)

    def _means(self, sums: Tensor, lagged: Tensor, over: Tensor, positions: Tensor) -> Tensor:
        """The largest head's mean [N,M] from the sums of grains up to each state, and those up to where each window begins,
        [windows x N,part]; ``over`` as :func:`_divisors` gives it.
        """
        count = len(sums)
        fronts = [lagged[i * count : (i + 1) * count, columns] for i, columns in enumerate(self._read_by_window)]
        sums = sums - (fronts[0] if len(fronts) == 1 else torch.cat(fronts, -1))
        if self._spread is not None:
            sums = sums.index_select(-1, self._spread)
        most = sums.view(count, -1, self._most).amax(-1)
        return most / over.index_select(0, positions.clamp(max=len(over) - 1))


def windows_of(module: UnbindModule) -> tuple[int, int, int]:
    """Window, first position that counts, and the window that holds: what modules that are read together have in common."""
    return module.window, module.first, module.hold or module.window


def _divisors(windows: Sequence[int], first: Tensor, least: Tensor) -> Tensor:
    """What sums of grains over ``windows`` up to a position are divided by, FP32 [positions,M], one row a position until it is the
    same for all that follow; none counts before the first that does.
    """
    window = torch.tensor(windows, dtype=torch.float32)
    counted = torch.arange(1, 1 + int((window + first).max()))[:, None] - first
    over = torch.maximum(torch.minimum(counted, window), least) * GRAIN
    return over.masked_fill_(counted <= 0, torch.inf)


def slice_or_index(columns: Sequence[int], device: torch.device) -> slice | Tensor:
    """Columns that follow each other are a slice, which is quicker."""
    if list(columns) == list(range(columns[0], columns[0] + len(columns))):
        return slice(columns[0], columns[0] + len(columns))
    return torch.tensor(columns, device=device)
