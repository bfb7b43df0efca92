"""Moments, detector, axis and gates as theorems."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbind_core.errors import FittingError
from unbind_core.fitting.calibration import gates, orient, strengths, threshold
from unbind_core.fitting.moments import CrossMoments, Moments, fisher_detector, load_moments, output_axis, save_moments


def states(rows: int, dimension: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return torch.randn(rows, dimension, generator=generator, dtype=torch.float64) @ mix + shift


def moments(rows: torch.Tensor) -> Moments:
    m = Moments(rows.shape[1])
    m.add(rows)
    return m


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_streaming_equals_batch(sizes: list[int]) -> None:
    rows = states(sum(sizes), 5, 1, shift=1e3)
    streamed = Moments(5)
    for part in rows.split(sizes):
        streamed.add(part)
    assert streamed.count == len(rows)
    torch.testing.assert_close(streamed.mean, rows.mean(0))
    if len(rows) > 1:
        torch.testing.assert_close(streamed.covariance, torch.cov(rows.T), rtol=1e-8, atol=1e-8)
    assert streamed.mean_norm == pytest.approx(float(rows.norm(dim=1).mean()))


def test_no_rows_change_nothing() -> None:
    full = moments(states(9, 3, 2))
    before = full.scatter.clone()
    full.add(torch.zeros(0, 3))
    assert full.count == 9
    assert torch.equal(full.scatter, before)


def test_moments_survive_the_disk_and_a_damaged_cache_is_no_cache(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_moments(file, {2: moments(states(9, 3, 2))})
    loaded = load_moments(file, [2])
    assert loaded is not None
    assert torch.equal(loaded[2].scatter, moments(states(9, 3, 2)).scatter)
    assert load_moments(file, [3]) is None
    file.write_bytes(file.read_bytes()[:50])
    assert load_moments(file, [2]) is None
    assert load_moments(tmp_path / "none", [2]) is None


def test_the_detector_is_ldas_direction_with_matched_shrinkage() -> None:
    """Equal class sizes: LDA's pooled covariance is half of S_f + S_r, and shrinkage a/(1-a) is the ridge."""
    forget, retain = states(400, 6, 3, shift=0.7), states(400, 6, 4)
    ridge = 0.01
    pooled = (torch.cov(forget.T, correction=0) + torch.cov(retain.T, correction=0)) / 2
    shrinkage = ridge / (1 + ridge)  # towards a sphere of the same trace
    shrunk = (1 - shrinkage) * pooled + shrinkage * pooled.trace() / 6 * torch.eye(6, dtype=torch.float64)
    expected = torch.linalg.solve(shrunk, forget.mean(0) - retain.mean(0))
    found = fisher_detector(moments(forget), moments(retain), ridge)
    assert float(found.w @ expected / expected.norm()) == pytest.approx(1.0, abs=1e-6)
    assert found.s_ref == pytest.approx(float((retain @ found.w).mean()))
    assert float(found.w.norm()) == pytest.approx(1.0)


def test_the_detector_does_not_depend_on_the_scale_of_the_states() -> None:
    forget, retain = states(50, 6, 3, shift=0.7), states(60, 6, 4)
    one = fisher_detector(moments(forget), moments(retain))
    other = fisher_detector(moments(forget * 1e3), moments(retain * 1e3))
    torch.testing.assert_close(one.w, other.w)


@pytest.mark.parametrize(
    ("forget", "retain", "message"),
    [
        (torch.zeros(1, 3), torch.ones(5, 3), "two of each"),
        (torch.ones(5, 3), torch.ones(5, 3), "ridge is 0"),
        (torch.full((5, 3), float("nan")), torch.ones(5, 3), "ridge is nan"),
        (states(9, 3, 1), states(9, 3, 1), "same mean"),
    ],
)
def test_degenerate_statistics_are_a_fitting_error(forget: torch.Tensor, retain: torch.Tensor, message: str) -> None:
    with pytest.raises(FittingError, match=message):
        fisher_detector(moments(forget), moments(retain))


def test_the_axis_minimises_the_quadratic_form_against_a_thousand_directions() -> None:
    h, g = states(80, 7, 5), states(80, 7, 6)
    cross = CrossMoments(7)
    cross.add(h[:30], g[:30])
    cross.add(h[30:], g[30:])
    matrix = (h.T @ g + g.T @ h) / 160
    torch.testing.assert_close(cross.symmetric, matrix)
    axis = output_axis(cross)
    lowest = axis.v0 @ matrix @ axis.v0
    assert float(lowest) == pytest.approx(axis.eigenvalue)
    directions = torch.nn.functional.normalize(states(1000, 7, 7), dim=1)
    assert bool((((directions @ matrix) * directions).sum(1) >= lowest - 1e-9).all())
    assert axis.gap > 0


def test_the_axis_needs_gradients() -> None:
    with pytest.raises(FittingError, match="gradients"):
        output_axis(CrossMoments(3))


def test_thresholds_are_linear_quantiles_of_positive_activations_with_repeats() -> None:
    activations = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 5.0])
    assert threshold(activations, 0.0) == 1.0
    assert threshold(activations, 1.0) == 5.0
    assert threshold(activations, 0.75) == pytest.approx(2.0)
    assert threshold(torch.zeros(4), 0.5) is None
    assert gates(torch.ones(1), torch.zeros(4), torch.ones(4, 1)) == []


@given(st.integers(0, 10_000))
def test_the_sign_makes_the_gated_update_raise_the_loss_to_first_order(seed: int) -> None:
    gradients = states(20, 4, seed)
    activations = torch.rand(20, generator=torch.Generator().manual_seed(seed))
    v0 = torch.nn.functional.normalize(states(1, 4, seed + 1)[0], dim=0)
    v, response = orient(v0, activations, gradients, tau=0.4)
    gated = torch.where(activations >= 0.4, activations, 0.0).double()
    assert float(-(gated @ (gradients @ v))) >= 0
    assert float(orient(-v0, activations, gradients, tau=0.4)[0] @ v) == pytest.approx(1.0)
    assert response == pytest.approx(float(gated @ (gradients @ v0) / gated.sum()))


def test_a_sign_tie_makes_the_first_largest_component_positive() -> None:
    v0 = torch.tensor([-0.5, 0.5, -0.5, 0.5])
    v, response = orient(v0, torch.ones(3), torch.zeros(3, 4), tau=0.5)
    assert response == 0.0
    assert v.tolist() == [0.5, -0.5, 0.5, -0.5]


def test_relative_strengths_move_admitted_states_by_their_share_of_the_retain_norm() -> None:
    (gate,) = gates(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 3.0]), torch.ones(2, 2), quantiles=[0.0])
    tried = strengths(gate, mean_norm=30.0, absolute=[0, 4], relative=[0.5])
    assert tried == [("paper", 0.0), ("paper", 4.0), ("norm", 7.5)]
    assert tried[-1][1] * gate.mean_open == 0.5 * 30.0
