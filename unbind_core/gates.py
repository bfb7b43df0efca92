"""How gates decide: from the states of one layer to an activation and an open or closed gate for each module.

One class a detector kind, each with its modules' tensors stacked; the bank (``bank.py``) turns what they say into an edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from unbind_core.memory import Places
from unbind_core.module import UnbindModule

GRAIN = 1024.0  # scores are rounded to 1/1024 of a threshold: then FP16 and sums of them are exact
CLIP = 2.0  # and count for at most two thresholds, so that no single position opens a gate for long


def activation(states: Tensor, w: Tensor, s_ref: Tensor) -> Tensor:
    """a = relu(h w' - s_ref) in FP32 (paper eq. 6): states [...,d] of any dtype, w [M,d], s_ref [M] -> [...,M].

    Thresholds are computed through this same function, so that a boundary at deployment is the boundary at calibration.
    """
    return functional.linear(states.float(), w, -s_ref).relu_()


def network_scores(states: Tensor, w: Tensor, b: Tensor, heads: Tensor, heads_b: Tensor) -> Tensor:
    """f(h) = heads relu(w h + b) + heads_b in FP32: states [...,d], w [h,d], b [h], heads [K,h], heads_b [K] -> [...,K]."""
    return functional.linear(functional.linear(states.float(), w, b).relu_(), heads, heads_b)


def normalised(scores: Tensor, s_ref: float, tau: float) -> Tensor:
    """z = (f - s_ref) / tau, clipped to +-2 and rounded to 1/1024: 1 is the threshold, and sums of z are exact."""
    return scores.sub(s_ref).mul_(GRAIN / tau).clamp_(-CLIP * GRAIN, CLIP * GRAIN).round_().div_(GRAIN)


def windowed(z: Tensor, window: int, seen: Tensor, before: Tensor | None = None) -> Tensor:
    """e_t: the mean of z over the last ``window`` positions of the sequence, fewer at its beginning.

    z [B,T,K], padding last in each row; ``seen`` int64 [T] or [B,T], how many positions a sequence has up to and with each
    of these; ``before`` [B,window-1,K], the scores in front, 0 before the beginning (None: nothing is in front).
    """
    if window == 1:
        return z
    if before is None:
        before = z.new_zeros(z.shape[0], window - 1, z.shape[2])
    sums = torch.cat((before, z), dim=1).cumsum(1, dtype=torch.float64)  # FP32 is exact for 8,192 positions only
    sums = functional.pad(sums, (0, 0, 1, 0))
    return ((sums[:, window:] - sums[:, :-window]) / seen.clamp(max=window).unsqueeze(-1)).to(z.dtype)


def held_open(opens: Tensor, closes: Tensor, before: Tensor) -> Tensor:
    """The state of two-threshold gates: open from a position that opens to one that closes; bool [B,T,M], before [B,M]."""
    if opens.shape[1] == 1:
        return opens | (before.unsqueeze(1) & ~closes)
    step = torch.arange(1, opens.shape[1] + 1, device=opens.device)[:, None]
    opened = torch.where(opens, step, 0).cummax(1).values
    closed = torch.where(closes, step, 0).cummax(1).values
    return (opened > closed) | (before.unsqueeze(1) & (closed == 0))


class FisherGates:
    """The paper's gates, without memory: open where a >= tau, and acting in proportion to a."""

    def __init__(
        self, modules: Sequence[UnbindModule], tensors: Sequence[Mapping[str, Tensor]], device: torch.device
    ) -> None:
        """Stack w FP32 [M,d], s_ref and tau FP32 [M]; ``tensors`` are the modules' own, on ``device``."""
        self._w = torch.stack([own["w"] for own in tensors])
        self._s_ref = torch.tensor([module.s_ref for module in modules], device=device)
        self._tau = torch.tensor([module.tau for module in modules], device=device)

    def __call__(self, layer: int, states: Tensor, real: Tensor | None, places: Places | None) -> tuple[Tensor, Tensor]:
        """(a, a >= tau), each [...,M]."""
        a = activation(states, self._w, self._s_ref)
        return a, a >= self._tau


class NetworkGates:
    """Gates whose detector is a small network with one head or more, a window and two thresholds.

    z_k = (f_k(h) - s_ref) / tau; e = max over heads of the mean of z over the window; opens at e >= 1, closes below
    tau_close / tau. An open gate acts with the strength kappa whatever e is.
    """

    def __init__(
        self, modules: Sequence[UnbindModule], tensors: Sequence[Mapping[str, Tensor]], columns: Sequence[int], width: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """``tensors`` are the modules' own, on ``device``; ``columns``: where each module's columns (its heads', then one for
        its state) begin among the layer's ``width``.
        """
        self._modules = [(m.s_ref, m.tau, m.window) for m in modules]
        self._nets = [tuple(own[name] for name in ("w", "b", "heads", "heads_b")) for own in tensors]
        self._counts = [len(own["heads"]) for own in tensors]
        self._close = torch.tensor(
            [m.tau_close / m.tau if m.tau_close is not None else 1.0 for m in modules], device=device
        )
        self._width = width
        self._longest = max(m.window for m in modules) - 1
        heads = [c for start, count in zip(columns, self._counts, strict=True) for c in range(start, start + count)]
        states = [start + count for start, count in zip(columns, self._counts, strict=True)]
        self._heads, self._states = (torch.tensor(part, device=device) for part in (heads, states))
        self._columns = torch.cat((self._heads, self._states))

    def __call__(self, layer: int, states: Tensor, real: Tensor | None, places: Places | None) -> tuple[Tensor, Tensor]:
        """(e, open), each [B,T,M]. Without ``places`` the rows are whole sequences from their beginning."""
        if states.dim() == 2:
            raise ValueError("gates with memory take states [B,T,d] of sequences, not single states [N,d]")
        states = states.detach()  # open or closed has no gradient, and a memory must hold no graph
        scores = [
            normalised(network_scores(states, *net), s_ref, tau)
            for net, (s_ref, tau, _) in zip(self._nets, self._modules, strict=True)
        ]
        z = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
        if real is not None:
            z = z.masked_fill(~real.unsqueeze(-1), 0)  # whatever padding holds, NaN included
        before = was_open = None
        if places is not None:
            seen = places.positions + 1
            if self._longest:
                before = places.before(layer, self._heads, self._longest, self._width).float()
            was_open = places.before(layer, self._states, 1, self._width)[:, 0] > 0
        elif real is not None:
            seen = real.cumsum(1).clamp_(min=1)
        else:
            seen = torch.arange(1, states.shape[1] + 1, device=states.device)
        e = self._means(z, seen, before) if real is None else self._means_of_real(z, seen, before, real)
        opens, closes = e >= 1, e < self._close
        if real is not None:
            opens, closes = opens & real.unsqueeze(-1), closes & real.unsqueeze(-1)
        if was_open is None:
            was_open = e.new_zeros(e.shape[0], e.shape[2], dtype=torch.bool)
        held = held_open(opens, closes, was_open)
        if places is not None:
            places.write(layer, self._columns, torch.cat((z, held), -1).half())
        return e, held

    def _means_of_real(self, z: Tensor, seen: Tensor, before: Tensor | None, real: Tensor) -> Tensor:
        """The means with padding moved behind the real positions, and back: a window reaches over it, wherever it stands."""
        order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        e = self._means(z.take_along_dim(order.unsqueeze(-1), 1), seen.gather(1, order), before)
        return torch.empty_like(e).scatter_(1, order.unsqueeze(-1).expand_as(e), e)

    def _means(self, z: Tensor, seen: Tensor, before: Tensor | None) -> Tensor:
        """e [B,T,M] from the scores of all heads [B,T,H] and those in front [B,longest,H]."""
        means, at = [], 0
        for count, (_, _, window) in zip(self._counts, self._modules, strict=True):
            heads = slice(at, at + count)
            front = None if before is None else before[:, self._longest - window + 1 :, heads]
            means.append(windowed(z[..., heads], window, seen, front).amax(-1))
            at += count
        return torch.stack(means, -1)
