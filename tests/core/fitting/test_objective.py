"""What a correction is learned by, beside the same written without haste and differentiated by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from unbind_core.fitting.corrections import objective
from unbind_core.fitting.corrections.objective import END, EXCESS, LEAST, NEVER, Own, pull, toward

ROWS, WORDS = 9, 40


def drawn(seed: int = 3) -> tuple[Tensor, Tensor, Own]:
    """Log-probabilities p, logits, and the rows' own tokens; p is sure of some, and never says one."""
    generator = torch.Generator().manual_seed(seed)
    p, logits = (4 * torch.randn(ROWS, WORDS, generator=generator, dtype=torch.float64) for _ in range(2))
    p[0, 2] = -60.0
    following = torch.randint(WORDS, (ROWS,), generator=generator)
    return log_softmax(p, -1), logits, Own(following, torch.arange(ROWS) % 3 > 0, 0.4)


def slowly(p: Tensor, logits: Tensor, own: Own, end: int | None) -> tuple[Tensor, Tensor]:
    """Loss and KL(p || q)."""
    q = log_softmax(logits, -1)
    ends = torch.zeros((), dtype=q.dtype)
    if end is not None:
        ends = -q[:, end].mean()
        p, q = (log_softmax(each.clone().index_fill(1, torch.tensor([end]), NEVER), -1) for each in (p, q))
    at = own.following[:, None]
    forward = (p.exp() * (p - q)).sum(-1).mean()
    back = (q.exp() * (q - p.clamp(min=LEAST))).sum(-1).mean()
    wider = (p.exp() * p).sum(-1).mean() - (q.exp() * q).sum(-1).mean()
    above = (q.gather(1, at) - p.gather(1, at)).squeeze(1) + own.margin
    return forward + back + wider**2 + EXCESS * (above.relu() * own.protected).mean() + END * ends, forward


@pytest.mark.parametrize("end", [None, 7])
@pytest.mark.parametrize("together", [1, 3 * WORDS, ROWS * WORDS])  # numbers at a time: a row, three, all
def test_loss_and_gradient_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, end: int | None, together: int
) -> None:
    monkeypatch.setattr(objective, "TOGETHER", together)
    p, logits, own = drawn()
    before = logits.clone()
    found = pull(p, logits, own, end)
    leaf = logits.clone().requires_grad_(True)
    loss, forward = slowly(p, leaf, own, end)
    loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(found.left, forward.detach())
    torch.testing.assert_close(found.gradient, leaf.grad)
    assert torch.equal(logits, before)

    leaf = logits.clone().requires_grad_(True)
    q = log_softmax(leaf, -1)
    loss = (p.exp() * (p - q)).sum(-1).mean()
    loss.backward()
    alone = toward(p, logits)
    assert leaf.grad is not None
    torch.testing.assert_close(alone.loss, loss.detach())
    torch.testing.assert_close(alone.gradient, leaf.grad)


def test_divergences_and_entropies_are_as_read_one_by_one() -> None:
    p, logits, _ = drawn()
    q = log_softmax(logits, -1)
    forward, back, wider = ([] for _ in range(3))
    for of_p, of_q in zip(p.tolist(), q.tolist(), strict=True):
        pairs = list(zip(of_p, of_q, strict=True))
        forward.append(sum(math.exp(a) * (a - b) for a, b in pairs))
        back.append(sum(math.exp(b) * (b - max(a, LEAST)) for a, b in pairs))
        wider.append(sum(math.exp(a) * a - math.exp(b) * b for a, b in pairs))
    of_nothing = Own(torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.bool))
    found = pull(p, logits, of_nothing)
    assert float(found.left) == pytest.approx(sum(forward) / ROWS)
    assert float(found.loss) == pytest.approx((sum(forward) + sum(back)) / ROWS + (sum(wider) / ROWS) ** 2)
    assert float(toward(p, logits).loss) == pytest.approx(sum(forward) / ROWS)


def test_nothing_pulls_where_both_say_the_same() -> None:
    p = drawn()[0][1:]
    own = Own(torch.zeros(len(p), dtype=torch.int64), torch.ones(len(p), dtype=torch.bool))
    for found in (pull(p, p, own), toward(p, p)):
        assert float(found.loss) == pytest.approx(0.0, abs=1e-9)
        assert float(found.gradient.abs().max()) < 1e-9
