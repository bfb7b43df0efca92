"""The network detector: it tells rows apart by their states, the same for a seed, and thresholds lie where the sides part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.conftest import LAYER, bank_of, edit, make_module, make_network_module, select
from unbind_core.applying.gates import decided
from unbind_core.applying.networks import GRAIN
from unbind_core.errors import Cancelled, FittingError
from unbind_core.fitting.network import Network, train_network
from unbind_core.fitting.separation import (
    FIRST,
    KEPT,
    NEAR,
    RAISED,
    Scored,
    as_decided,
    clear,
    evidence,
    later,
    least,
    opens_within,
    separation,
)
from unbind_core.identity import ModelIdentity
from unbind_core.progress import Progress

ROWS, D = 4, 12


def clusters(each: int = 60, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """States of rows around a point each, and retained states around the origin, on a scale far from 1."""
    generator = torch.Generator().manual_seed(seed)
    centres = 4 * torch.randn(ROWS, D, generator=torch.Generator().manual_seed(9))
    rows = torch.arange(ROWS).repeat_interleave(each)
    forget = centres[rows] + torch.randn(len(rows), D, generator=generator)
    return 50 * forget + 7, rows, 50 * torch.randn(300, D, generator=generator) + 7


def trained(seed: int = 0, steps: int = 20, **changes: Any) -> Network:
    forget, rows, retain = clusters()
    return train_network(forget, rows, retain, width=8, steps=steps, seed=seed, **changes)


def test_it_tells_rows_it_never_saw_the_states_of_apart() -> None:
    forget, rows, retain = clusters(seed=1)
    network = trained(steps=250)
    scores = network.scores(forget)
    assert scores.shape == (len(forget), ROWS) and scores.dtype == torch.float32
    assert float((scores.argmax(1) == rows).float().mean()) > 0.98
    assert float((scores.amax(1) > 0).float().mean()) > 0.98
    assert float((network.scores(retain).amax(1) < 0).float().mean()) > 0.9


def test_rare_states_that_look_like_a_row_are_met_often_enough_to_be_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget, rows, _ = clusters()
    generator = torch.Generator().manual_seed(2)
    retain = 50 * torch.randn(20_000, D, generator=generator) + 7
    rare = torch.arange(0, len(retain), 400)  # one in 400, beside the first row's
    beside = forget[rows == 0].mean(0) + torch.cat((torch.full((1,), 150.0), torch.zeros(D - 1)))
    retain[rare] = beside + 25 * torch.randn(len(rare), D, generator=generator)

    def mistaken() -> float:
        network = train_network(forget, rows, retain, width=8, steps=300, batch=128)
        assert float((network.scores(forget).argmax(1) == rows).float().mean()) > 0.95
        return float(network.scores(retain[rare]).amax(1).mean())

    searched = mistaken()
    monkeypatch.setattr("unbind_core.fitting.network.LOOKED_FOR", ())
    assert searched < mistaken() - 1  # nat


def test_a_seed_gives_the_same_network_and_leaves_other_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first, second, other = trained(), trained(), trained(seed=1)
    assert torch.equal(torch.rand(1), expected)
    for name in ("w", "b", "heads", "heads_b"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert not torch.equal(first.w, other.w)


def test_states_in_half_precision_and_training_inside_no_grad_work() -> None:
    forget, rows, retain = clusters()
    with torch.no_grad():
        network = train_network(forget.bfloat16(), rows, retain.bfloat16(), width=8, steps=20)
    assert network.w.shape == (8, D) and network.heads.shape == (ROWS, 8)
    assert not network.w.requires_grad and network.w.dtype == torch.float32


def test_one_row_needs_one_head() -> None:
    forget, rows, retain = clusters()
    network = train_network(forget[rows == 0], rows[rows == 0], retain, width=8, steps=60)
    assert network.heads.shape == (1, 8)
    assert float(network.scores(forget[rows == 0]).median()) > 0 > float(network.scores(retain).median())


def test_states_that_are_not_finite_are_refused() -> None:
    forget, rows, retain = clusters()
    forget[3] = float("nan")
    with pytest.raises(FittingError, match="not finite"):
        train_network(forget, rows, retain, width=8, steps=5)


def test_training_reports_and_can_be_stopped() -> None:
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if progress.done >= 10:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        trained(progress=stop, stage="detector of 16")
    assert seen[-1].stage == "detector of 16" and seen[-1].total == 20


def test_evidence_is_the_best_heads_mean_over_the_window() -> None:
    scores = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    (found,) = evidence([(5, 2, scores)], 4, -1.0)
    expected = [-1.0] * FIRST  # nothing counts yet
    for t in range(FIRST, 12):
        last = scores[max(FIRST, t - 3) : t + 1] + 1.0
        expected.append(float(last.sum(0).max() / max(len(last), least(4))) - 1.0)
    assert (found.row, found.first) == (5, 2)
    torch.testing.assert_close(found.e, torch.tensor(expected))


def side(values: Tensor, first: int = 0) -> list[Scored]:
    """One row with a head whose windowed evidence is the values themselves, behind positions that do not count."""
    return [(0, FIRST + first, torch.cat((torch.zeros(FIRST), values))[:, None])]


@settings(deadline=None)
@given(st.floats(0.1, 50), st.floats(-20, 20), st.integers(0, 100))
def test_with_a_gap_thresholds_go_up_from_what_the_retain_side_allows(gap: float, offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    theirs = offset - torch.rand(200, generator=generator)
    ours = offset + gap + torch.rand(100, generator=generator)
    found = separation(side(ours), side(theirs), 1, 0.01)
    assert found.thresholds == sorted(found.thresholds) and found.thresholds[0] == found.retained
    assert found.highest < found.thresholds[-1] < float(ours.min())
    assert found.margin > 0


def test_without_a_gap_the_retain_side_decides() -> None:
    theirs, ours = torch.linspace(-1, 1, 1000), torch.linspace(0, 3, 1000)
    many = [row for i in range(100) for row in side(theirs if i == 0 else theirs - 3)]
    many = [(i, first, scores) for i, (_, first, scores) in enumerate(many)]  # one of a hundred rows comes near
    found = separation(side(ours), many, 1, 0.01)
    assert found.retained < found.highest == float(theirs.max())
    assert float((theirs >= found.retained).float().mean()) / 100 <= 0.01
    assert separation(side(-ours), many, 1, 0.01).margin < 0


def test_a_threshold_that_touches_more_than_a_few_rows_is_no_threshold() -> None:
    spikes = [torch.cat((torch.full((99,), -1.0), torch.full((1,), 1.0 + i / 100))) for i in range(10)]
    rows = [(i, first, scores) for i, values in enumerate(spikes) for _, first, scores in side(values)]
    assert separation(side(torch.full((50,), 9.0)), rows, 1, 0.05).retained > 1.09


def test_a_gate_opens_where_the_evidence_first_reaches_the_threshold_or_never() -> None:
    rows = [*side(torch.linspace(-1, 1, 21)), *side(torch.linspace(-1, 0, 21))]
    split = separation(rows, side(torch.full((50,), -2.0)), 1, 0.01)
    assert opens_within(rows, split, 0.45) == [FIRST + 15, None]


def test_beside_others_a_threshold_goes_up_as_far_as_the_gate_stays_open_nearly_as_long() -> None:
    split = separation(side(torch.full((50,), 9.0)), side(torch.full((50,), -2.0)), 1, 0.01)
    evidence_of_row, opening = split.reference + torch.linspace(1, 3, 400), split.reference + 1
    raised = later(split, opening, 1.0, side(evidence_of_row))
    left = int((evidence_of_row >= raised).sum())
    assert opening < raised < split.reference + 1.1 and KEPT * 400 <= left < 400
    # once open it stays so down to where it closed before
    assert later(split, opening, 1.0, side(evidence_of_row.flip(0))) == pytest.approx(split.reference + RAISED)
    assert later(split, opening, 1.0, side(torch.full((50,), opening))) == opening


def test_positions_before_the_first_that_matters_do_not_count() -> None:
    ours = torch.cat((torch.full((10,), -100.0), torch.full((20,), 5.0)))
    found = separation(side(ours, first=10), side(torch.zeros(50)), 1, 0.01)
    assert found.forgotten == 5.0


def scored(sequences: int, length: int, shift: float, seed: int) -> tuple[list[Tensor], list[tuple[int, int, Tensor]]]:
    """States of whole sequences and their scores by :func:`untrained`; spikes among them are what clipping is for."""
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(length, D, generator=generator) + shift for _ in range(sequences)]
    for one in states:
        one[:: length // 3] *= 12
    return states, [(row, 0, untrained().scores(one)) for row, one in enumerate(states)]


def untrained() -> Network:
    generator = torch.Generator().manual_seed(2)
    shapes = ((6, D), (6,), (3, 6), (3,))
    return Network(*(torch.randn(shape, generator=generator) for shape in shapes))


def open_when_served(states: list[Tensor], s_ref: float, tau: float, window: int, beside: int) -> list[Tensor]:
    """Where a module with these thresholds is open, in a bank with ``beside`` other modules that are larger or smaller."""
    network, identity = untrained(), ModelIdentity("f" * 64, "tiny", D, 4)
    tensors = {name: getattr(network, name) for name in ("w", "b", "heads", "heads_b")}
    own = {"detector": "network", "s_ref": s_ref, "tau": tau, "tau_close": None, "window": window}
    own |= {"first": FIRST, "least": least(window)}
    others = [
        make_network_module(identity, f"b{i}", LAYER, seed=i, width=3 + 4 * i, heads=1 + 2 * i) for i in range(beside)
    ]
    bank = bank_of(make_module(identity, "a", LAYER, **tensors, **own), *others)
    found = []
    for sequence in states:
        record: list[tuple[tuple[str, ...], Tensor]] = []
        edit(select(bank, dict.fromkeys(bank.names, 0.0)), LAYER, sequence[None], record=record)
        found += [e[0, :, names.index("a")] for names, e in record if "a" in names]
    return found


@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("window", [1, 4, 16])
def test_a_boundary_found_at_calibration_is_the_boundary_at_deployment(window: int, beside: int) -> None:
    """As many positions are open as it allows, through clipping, rounding and stacking; scores as they are give another one."""
    ours, forget = scored(6, 60, 0.4, 1)
    theirs, retain = scored(20, 60, 0.0, 2)
    raw = separation(forget, retain, window, 0.02)
    found = as_decided(raw, forget, retain)
    assert found.reference == raw.reference
    if window > 1:  # some spike counted for more than two thresholds
        assert found.retained < 0.9 * raw.retained
    allowed = sum(int((one.e >= raw.retained).sum()) for one in evidence(retain, window, raw.reference))
    reached = len(ours) * 60 - max(1, round(0.005 * len(ours) * 60)) + 1
    for boundary, states, sequences, most in (
        (found.highest, theirs, retain, 1),
        (found.retained, theirs, retain, allowed),
        (found.forgotten, ours, forget, reached),
    ):
        tau = (boundary - found.reference) * 1.002  # beside the boundary, where no last bit decides
        if tau > 0:  # a network's gate opens above its reference only
            served = open_when_served(states, found.reference, tau, window, beside)
            counted = sum(
                int((decided(scores, found.reference, tau, window, FIRST, least(window)) >= 1).sum())
                for _, _, scores in sequences
            )
            assert sum(int((e > 0).sum()) for e in served) == counted <= most
            assert counted >= most - 2  # and no further away from it than clipped scores make necessary


@pytest.mark.parametrize("window", [1, 4, 16])
def test_the_evidence_a_fit_goes_by_is_that_of_the_gate(window: int) -> None:
    states, sequences = scored(10, 60, 0.3, 3)
    served = open_when_served(states, 0.7, 1.3, window, 2)
    for (_, _, scores), e in zip(sequences, served, strict=True):
        expected = decided(scores, 0.7, 1.3, window, FIRST, least(window))
        clear = (expected - 1).abs() > 1 / GRAIN  # on the grain itself the last bit of a product may decide
        assert torch.equal((e > 0)[clear], (expected >= 1)[clear]) and bool(clear.any())
        torch.testing.assert_close(e[clear & (e > 0)], expected[clear & (e > 0)], atol=1.01 / GRAIN, rtol=0)


@pytest.mark.parametrize("closing", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("window", [8, 16])
def test_no_position_of_the_rows_is_near_a_boundary(window: int, closing: float) -> None:
    """A threshold is what a retain position reaches, so by itself it would stand beside that position."""
    generator = torch.Generator().manual_seed(1)
    forget: list[Scored] = [(row, 0, 1 + torch.randn(200, 1, generator=generator)) for row in range(6)]
    retain: list[Scored] = [(row, 0, torch.randn(200, 1, generator=generator)) for row in range(20)]
    split = as_decided(separation(forget, retain, window, 0.05), forget, retain)

    def near(threshold: float, boundary: float, sequences: list[Scored]) -> int:
        """Positions of which another engine may decide otherwise."""
        tau = threshold - split.reference
        of = (split.reference, tau, window, FIRST, least(window))
        lower, higher = (
            torch.cat([decided(one + by * NEAR * tau / GRAIN, *of) >= boundary for _, _, one in sequences])
            for by in (-1, 1)
        )
        return int((lower != higher).sum())

    found = next(at for at in (split.retained - 1e-5 * number for number in range(2000)) if near(at, 1, retain))
    threshold, _ = clear(split, found, closing, forget, retain)
    if closing < 1:  # one that some position of the rows is near
        closing = next(at for at in (closing - 1e-5 * number for number in range(4000)) if near(threshold, at, forget))
    threshold, share = clear(split, found, closing, forget, retain)
    assert (share == closing) == (closing == 1)
    assert found < threshold < split.reference + 1.02 * (found - split.reference)
    assert abs(share - closing) <= 0.02 * closing
    assert near(threshold, 1, [*forget, *retain]) == 0
    assert near(threshold, share, forget) == 0
    assert clear(split, threshold, share, forget, retain) == pytest.approx((threshold, share))
