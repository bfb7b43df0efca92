"""How far apart a network puts forget and retain rows: evidence over a window, and the thresholds that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unbind_core.applying.gates import decided, windowed
from unbind_core.applying.networks import GRAIN

WINDOWS = (8, 16)
# An open gate closes where the mean over so many positions, too, says that this is no row: a few tokens that say nothing, put
# between a row and its next tokens, do not shut it.
HOLD = 64
# The position from which on states say whose they are: of a sequence, where scores count; of a row, where training begins.
FIRST = 4
EARLY = 12  # tokens of a row within which its gate is to be open
GAP = (0.25, 0.5)
TOUCHED = 0.02  # of the retain rows may have an open gate anywhere
FIRST_SHARE = (
    0.5  # of the budget of open positions is what the lowest threshold takes: other rows and latches cost more
)
MISSED = 0.005  # share of the forget positions that need not be reached
ALIKE = 0.01  # of the retain rows may be so like a row to forget that they are learned too
SETTLING = 16  # steps towards a boundary; three or four do where few scores are clipped
RESAMPLES, QUANTILE = 1000, 0.95
NEAR = 0.25  # grains: of scores as far apart as that some round to another grain, as those of engines do that differ in a last bit
SHIFT, SHIFTS = 5e-4, 24  # a boundary's share that it is moved by, and how often
KEPT = 0.98  # of the forget positions that a gate is open at, it stays open at where its threshold is raised,
RAISED, STEPS = 1.5, 25  # to so many times itself at most, in so many steps


@dataclass(frozen=True)
class Evidence:
    """The largest head's windowed score of one sequence, FP32 [T], and from where on its gate should be open."""

    row: int
    first: int
    e: Tensor


Scored = tuple[int, int, Tensor]  # row, first position that matters, scores [T,K]


def least(window: int) -> int:
    """How many positions a mean over this window is taken over at least: one score alone opens no gate."""
    return max(1, window // 2)


def evidence(sequences: Iterable[Scored], window: int, reference: float, fewest: int | None = None) -> list[Evidence]:
    """e_t of scored sequences for a window, unclipped; what is missing is ``reference``. ``fewest``: positions that a mean is taken
    over at least, by default those that :func:`least` says.
    """
    found = []
    for row, first, scores in sequences:
        seen = torch.arange(1, len(scores) + 1, device=scores.device)
        e = (
            windowed(scores.unsqueeze(0) - reference, window, seen, FIRST, fewest or least(window))[0].amax(-1)
            + reference
        )
        found.append(Evidence(row, first, e))
    return found


@dataclass(frozen=True)
class Separation:
    """How far apart a detector puts forget and retain evidence with one window.

    ``retained`` is the lowest threshold at which the retain rows' opening rate, estimated cautiously, is within half of the
    budget and few of them are touched; ``highest`` the largest retain score of all, ``forgotten`` the score that all but 0.5 % of
    the forget positions reach, ``reference`` the mean of each retain position's best score (what the paper calls s_ref).
    ``margin`` is the gap between forgotten and retained, in units of the distance between the two medians.
    """

    window: int
    reference: float
    retained: float
    highest: float
    forgotten: float
    margin: float

    def to_json(self) -> dict[str, float]:
        """As reports hold it."""
        return {key: round(value, 4) for key, value in self.__dict__.items()}

    @property
    def thresholds(self) -> list[float]:
        """Where to open, the earliest first: as the retain side allows, over most of it, over all of it, further up."""
        top = max(self.retained, self.highest)
        gap = max(0.0, self.forgotten - top)
        every = [self.retained, (self.retained + top) / 2, top + 1e-3 * abs(top)]
        return sorted({*every, *(top + share * gap for share in GAP if gap)})


def separation(forget: Sequence[Scored], retain: Sequence[Scored], window: int, rate: float) -> Separation:
    """Measure one window's evidence; ``rate`` is the share of retain positions that may be open, estimated cautiously, of which
    the lowest threshold takes a part.
    """
    reference = float(torch.cat([scores.amax(-1) for _, _, scores in retain]).mean())
    kept = evidence(retain, window, reference)
    ours = torch.cat([one.e[one.first :] for one in evidence(forget, window, reference)])
    theirs = torch.cat([one.e for one in kept])
    retained = _lowest_within(kept, theirs, FIRST_SHARE * rate)
    forgotten = float(ours.kthvalue(max(1, round(MISSED * len(ours)))).values)
    spread = float(ours.median() - theirs.median())
    margin = (forgotten - retained) / spread if spread > 0 else -1.0
    return Separation(window, reference, retained, float(theirs.max()), forgotten, margin)


def alike(splits: Sequence[Separation], forget: Sequence[Scored], retain: Sequence[Scored], rate: float) -> list[int]:
    """The few retain rows, by number, without which some window has a margin where none of ``splits``, which are with them, has
    one; mostly there are none.

    Such a row resembles one row to forget so much that thresholds which keep its gate shut keep it shut on all others, too.
    """
    if max(split.margin for split in splits) >= 0:
        return []
    highest: dict[int, float] = {}
    for one in evidence(retain, max(WINDOWS), 0.0):
        highest[one.row] = max(highest.get(one.row, -math.inf), float(one.e.max()))
    few = sorted(sorted(highest, key=lambda row: highest[row])[-max(1, round(ALIKE * len(highest))) :])
    rest = [one for one in retain if one[0] not in few]
    return few if rest and max(separation(forget, rest, split.window, rate).margin for split in splits) >= 0 else []


def as_decided(split: Separation, forget: Sequence[Scored], retain: Sequence[Scored]) -> Separation:
    """``split`` with its boundaries where the gate that is served has them, which clips and rounds each score.

    Each boundary goes to the threshold at which the same number of positions is at or above it as was found on scores as they are.
    """

    def reached(sequences: Sequence[Scored], tau: float) -> Tensor:
        return torch.cat(
            [
                decided(scores, split.reference, tau, split.window, FIRST, least(split.window))[first:]
                for _, first, scores in sequences
            ]
        )

    def settled(threshold: float, statistic: Callable[[float], Tensor]) -> float:
        tau = threshold - split.reference
        for _ in range(SETTLING):
            if tau <= 0 or abs(ratio := float(statistic(tau)) - 1) <= 0.5 / GRAIN:
                break
            tau *= 1 + ratio
        return split.reference + tau if tau > 0 else threshold

    whole = [(row, 0, scores) for row, _, scores in retain]
    every = torch.cat([one.e for one in evidence(whole, split.window, split.reference)])
    open_there = int((every >= split.retained).sum())
    ours = sum(len(scores) - first for _, first, scores in forget)
    missed = max(1, round(MISSED * ours))
    highest = settled(split.highest, lambda tau: reached(whole, tau).max())
    return replace(
        split,
        highest=highest,
        retained=settled(split.retained, lambda tau: reached(whole, tau).topk(open_there).values[-1])
        if open_there
        else highest + (split.retained - split.highest),
        forgotten=settled(split.forgotten, lambda tau: reached(forget, tau).kthvalue(missed).values),
    )


def clear(
    split: Separation, threshold: float, closing: float, forget: Sequence[Scored], retain: Sequence[Scored]
) -> tuple[float, float]:
    """``threshold`` and ``closing``, a share of it, moved by some hundredths at most to where no or the fewest positions are near.

    A position is near a boundary where the gate decides otherwise if all scores are NEAR grains higher or lower, as the products
    of another engine may be. A threshold is what some retain position reaches, so by itself it would stand beside that one. It is
    moved up only, as it is the lowest that the retain rows allow.
    """

    def around(sequences: Sequence[Scored], tau: float, window: int = split.window) -> tuple[Tensor, Tensor]:
        few = NEAR * tau / GRAIN
        of = (split.reference, tau, window, FIRST, least(split.window))
        lower, higher = (torch.cat([decided(one[2] + by, *of) for one in sequences]) for by in (-few, few))
        return lower, higher

    def near(found: tuple[Tensor, Tensor], boundary: float) -> int:
        return int(((found[0] < boundary) & (found[1] >= boundary)).sum())

    def clearest(places: Iterable[float], count: Callable[[float], int]) -> float:
        best: tuple[int, float] | None = None
        for place in places:
            found = count(place)
            if best is None or found < best[0]:
                best = found, place
            if not found:
                break
        assert best is not None
        return best[1]

    up = [1 + number * SHIFT for number in range(SHIFTS)]
    every = [*forget, *retain]
    tau = clearest([(threshold - split.reference) * share for share in up], lambda tau: near(around(every, tau), 1))
    ours = [around(forget, tau, window) for window in (split.window, HOLD)]
    shares = [closing * share for above in up for share in (above, 2 - above)]
    share = closing if closing == 1 else clearest(shares, lambda share: sum(near(one, share) for one in ours))
    return split.reference + tau, share


def later(split: Separation, threshold: float, closing: float, forget: Sequence[Scored]) -> float:
    """``threshold``, raised as far as the gate stays open at nearly as many positions of the rows; of a sequence those from
    ``first`` on count. It closes where it closed, at ``closing`` of the threshold as it was.
    """
    found = evidence(forget, split.window, split.reference)
    holding = evidence(forget, HOLD, split.reference, least(split.window))
    tau = threshold - split.reference
    below = split.reference + closing * tau

    def held(opening: float) -> int:
        both = zip(found, holding, strict=True)
        return sum(int(_open(one.e, far.e, opening, below)[one.first :].sum()) for one, far in both)

    before, raised = held(threshold), threshold
    for step in range(1, STEPS + 1):
        higher = split.reference + tau * (1 + (RAISED - 1) * step / STEPS)
        if held(higher) < KEPT * before:
            break
        raised = higher
    return raised


def _open(e: Tensor, holding: Tensor, opening: float, closing: float) -> Tensor:
    """Where a gate is open that opens where e is at or above one and closes where both are below the other, bool [T]."""
    step = torch.arange(1, len(e) + 1, device=e.device)
    closes = (e < closing) & (holding < closing)
    opened, closed = (torch.where(at, step, 0).cummax(0).values for at in (e >= opening, closes))
    return opened > closed


def opens_within(forget: Sequence[Scored], split: Separation, threshold: float) -> list[int | None]:
    """How many tokens of each sequence there are before its gate opens at this threshold; None where it stays shut."""
    found: list[int | None] = []
    for one in evidence(forget, split.window, split.reference):
        hits = (one.e >= threshold).nonzero()
        found.append(int(hits[0, 0]) if len(hits) else None)
    return found


def told(opens: Sequence[int | None]) -> dict[str, float | None]:
    """Tokens of a row before its gate opens: of half of the rows and of 95 % (None where it stays shut on too many); the share of
    rows on which it is open within EARLY tokens, and how many it never opens on.
    """
    known = sorted(count for count in opens if count is not None)

    def share(part: float) -> int | None:
        at = math.ceil(part * len(opens)) - 1
        return known[at] if at < len(known) else None

    within = sum(count < EARLY for count in known) / len(opens)
    return {"median": share(0.5), "p95": share(0.95), f"within_{EARLY}": within, "never": len(opens) - len(known)}


def _lowest_within(retain: Sequence[Evidence], every: Tensor, rate: float) -> float:
    """The lowest of some thresholds at which the cautious opening rate is within ``rate`` and few rows are touched, or over all."""
    for share in (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02):
        tau = float(every.topk(max(1, round(share * rate * len(every)))).values[-1])
        rows: dict[int, tuple[float, float]] = {}
        for one in retain:
            opened, count = rows.get(one.row, (0.0, 0.0))
            rows[one.row] = opened + float((one.e >= tau).sum()), count + len(one.e)
        touched = sum(opened > 0 for opened, _ in rows.values()) / len(rows)
        if cautious(list(rows.values())) <= rate and touched <= TOUCHED:
            return tau
    return float(every.max()) * (1 + 1e-6) + 1e-6


def cautious(parts: Sequence[tuple[float, float]], seed: int = 0) -> float:
    """sum(a) / sum(b) over (a, b) of each row, on the high side: the 95 % quantile of it over rows drawn again and again.

    A margin to choose by, and no bound: where no row costs anything it is 0. What holds is in ``evaluation/bounds.py``.
    """
    table = torch.tensor(parts, dtype=torch.float64)
    drawn = torch.randint(len(parts), (RESAMPLES, len(parts)), generator=torch.Generator().manual_seed(seed))
    sums = table[drawn].sum(1)
    return float((sums[:, 0] / sums[:, 1].clamp(min=1e-12)).quantile(QUANTILE))
