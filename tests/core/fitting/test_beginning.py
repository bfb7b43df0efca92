"""Where the learning of a correction begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unbind_core.applying.corrections import corrected
from unbind_core.fitting.corrections.beginning import RIDGE, Parts, beginning, nearest, paired


def test_the_nearest_linear_map_is_that_of_least_squares() -> None:
    """Of full rank as solved directly, with the ridge; of a lower one the best there is, by its singular values."""
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(500, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 3
    change = torch.randn(6, 6, generator=generator)
    wanted = states + states @ change + 0.5 + 0.1 * torch.randn(500, 6, generator=generator)
    drawn = torch.randn(6, 6, generator=generator)

    def error(rank: int) -> float:
        u, a, c = nearest(states, wanted, drawn[:rank])
        return float((states + (states @ a.T) @ u.T + c - wanted).pow(2).sum())

    x, y = states - states.mean(0), (wanted - states) - (wanted - states).mean(0)
    square = x.T @ x
    square = square + RIDGE * torch.diag(square.diagonal())
    solved = torch.linalg.solve(square, x.T @ y)
    u, a, _ = nearest(states, wanted, drawn)
    torch.testing.assert_close((u @ a).T, solved, rtol=1e-3, atol=1e-3)
    errors = [error(rank) for rank in range(1, 7)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 10 * errors[-1]
    root = torch.linalg.cholesky(square)
    of_map = torch.linalg.svdvals(root.T @ solved)
    u, a, _ = nearest(states, wanted, drawn[:2])
    left = (root.T @ (solved - (u @ a).T)).pow(2).sum()
    assert float(left) == pytest.approx(float(of_map[2:].pow(2).sum()), rel=1e-3)


def test_learning_begins_at_the_nearest_map_where_that_helps() -> None:
    """States a known map away from ours: there at once. Of another width, or of a model whose head reads them otherwise:
    from nothing.
    """
    generator = torch.Generator().manual_seed(1)
    states = (torch.randn(600, 32, generator=generator) @ torch.randn(32, 32, generator=generator)).to(torch.bfloat16)
    change = 0.3 * torch.randn(32, 32, generator=generator)
    wanted = (states.float() @ (torch.eye(32) + change)).to(torch.bfloat16)

    def left_by(of: Tensor) -> Callable[[Parts], float]:
        ones = torch.ones(len(states))
        return lambda parts: float((corrected(states.float(), ones, *parts) - of.float()).pow(2).mean())

    def begun(of: Tensor, judged_by: Tensor) -> Parts:
        generator = torch.Generator().manual_seed(0)
        return beginning(states, of, left_by(judged_by), units=48, generator=generator)

    judge, parts = left_by(wanted), begun(wanted, wanted)
    assert judge(parts) < 0.1 * judge(Parts(*(0 * part for part in parts)))
    for elsewhere, judged_by in ((wanted[:, :16], states), (wanted, states), (states, states)):
        found = begun(elsewhere, judged_by)
        assert not bool(found.u.any()) and bool(found.a.any())


def test_a_linear_map_as_a_network_is_that_map_and_each_state_has_a_part_of_its_units_at_work() -> None:
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(400, 8, generator=generator) + 2
    u, a, c = (torch.randn(shape, generator=generator) for shape in ((8, 3), (3, 8), (8,)))
    parts = paired(u, a, c, states)
    found = corrected(states, torch.ones(len(states)), *parts)
    torch.testing.assert_close(found, states + states @ a.T @ u.T + c, atol=1e-4, rtol=1e-4)
    at_work = (states @ parts.a.T + parts.e > 0).float().mean(0)
    assert len(at_work) == 12
    thirds = torch.tensor([2.0, 1.0, 1.0, 2.0]).repeat_interleave(3) / 3
    torch.testing.assert_close(at_work, thirds, atol=0.02, rtol=0)
