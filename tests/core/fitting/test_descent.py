"""How weights are learned: Muon's steps for matrices, Adam's for vectors."""

from __future__ import annotations

import pytest
import torch

from unbind_core.fitting.descent import MOMENTUM, Descent, Muon, orthogonal


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (16, 16), (1, 5)])
@pytest.mark.parametrize("fast", [False, True])
def test_all_directions_of_a_gradient_become_about_as_long(
    shape: tuple[int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unbind_core.fitting.descent.bfloat16_is_fast", lambda _device: fast)
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    lengths = torch.logspace(0, -1.5, min(shape))  # one direction thirty times as long as another
    found = orthogonal(1e-4 * left @ lengths.diag() @ right)
    assert found.dtype == torch.float32 and found.shape == shape
    within = (left.T @ found @ right.T).diagonal()
    assert bool(((within > 0.6) & (within < 1.3)).all())


def test_a_gradient_of_zeros_moves_nothing() -> None:
    assert bool((orthogonal(torch.zeros(3, 4)) == 0).all())


def test_a_step_is_as_long_as_its_rate_says_whatever_the_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (1e-6, 1e6):
        matrix = torch.zeros(64, 32, requires_grad=True)
        matrix.grad = size * torch.randn(64, 32, generator=generator)
        Muon([{"params": [matrix], "lr": 0.5}]).step()
        assert float(matrix.detach().pow(2).mean().sqrt()) == pytest.approx(0.5, rel=0.2)


def test_gradients_are_averaged_and_numbers_shrink_by_the_decay() -> None:
    first, second = torch.eye(4), -torch.eye(4)[[1, 0, 3, 2]]
    matrix = torch.full((4, 4), 8.0, requires_grad=True)
    muon = Muon([{"params": [matrix], "lr": 0.1}], decay=2.0)
    expected, mean = torch.full((4, 4), 8.0), torch.zeros(4, 4)
    for gradient in (first, second):
        matrix.grad = gradient.clone()
        muon.step()
        mean = MOMENTUM * mean + (1 - MOMENTUM) * gradient
        ahead = (1 - MOMENTUM) * gradient + MOMENTUM * mean
        expected = expected * (1 - 0.1 * 2.0) - 0.1 * 2 * orthogonal(ahead)  # 2: the root of the longer side
    assert torch.allclose(matrix.detach(), expected, atol=1e-5)


def test_matrices_and_vectors_go_down_and_their_rates_fall() -> None:
    generator = torch.Generator().manual_seed(2)
    matrix, vector = torch.randn(8, 5, generator=generator), torch.randn(5, generator=generator)
    wanted = torch.randn(8, 5, generator=generator), torch.randn(5, generator=generator)
    for one in (matrix, vector):
        one.requires_grad_(True)
    descent = Descent([(matrix, 0.1), (vector, 0.1)], lambda step: 1 - step / 100)
    apart = []
    for _ in range(100):
        loss = (matrix - wanted[0]).pow(2).sum() + (vector - wanted[1]).pow(2).sum()
        loss.backward()
        descent.step()
        assert matrix.grad is None and vector.grad is None
        apart.append(float(loss.detach()))
    assert apart[-1] < 0.01 * apart[0]
    before = matrix.detach().clone()
    matrix.grad = torch.ones_like(matrix)
    descent.step()  # of a rate that has fallen to nothing
    assert torch.equal(matrix.detach(), before)
