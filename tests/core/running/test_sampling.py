"""Tokens are drawn as the library would draw them from the nucleus it finds by sorting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from unbind_core.errors import UnbindError
from unbind_core.running.sampling import Nucleus

DRAWS = 40_000


def library(scores: Tensor, temperature: float, top_p: float) -> Tensor:
    """Probabilities [B,V] of the library's own warpers."""
    none = torch.zeros(len(scores), 1, dtype=torch.int64)
    return torch.softmax(TopPLogitsWarper(top_p)(none, TemperatureLogitsWarper(temperature)(none, scores)), -1)  # type: ignore[arg-type]


def drawn(scores: Tensor, temperature: float, top_p: float) -> Tensor:
    found = Nucleus(temperature, top_p)(torch.zeros(len(scores), 1, dtype=torch.int64), scores)
    assert (
        found.shape == scores.shape
        and bool(((found == 0).sum(-1) == 1).all())
        and bool((found.isinf() | (found == 0)).all())
    )
    return found.argmax(-1)


@pytest.mark.parametrize("temperature", [0.2, 0.8, 1.5])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("spread", [0.01, 3.0])  # nearly flat, and peaked
def test_frequencies_are_those_of_the_nucleus(temperature: float, top_p: float, spread: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(1, 60) * spread
    wanted = library(scores, temperature, top_p)[0]
    counts = torch.bincount(drawn(scores.expand(DRAWS, -1), temperature, top_p), minlength=60) / DRAWS
    assert not bool(counts[wanted == 0].any())
    assert float((counts - wanted).abs().sum()) / 2 < 0.02


def test_each_row_has_a_distribution_of_its_own_and_what_is_banned_is_never_drawn() -> None:
    torch.manual_seed(1)
    scores = torch.randn(200, 500)
    scores[:, ::2] = -torch.inf
    scores[torch.arange(200), torch.arange(200) * 2 + 1] = 30.0
    assert drawn(scores, 1.0, 0.9).tolist() == [2 * row + 1 for row in range(200)]
    tokens = drawn(torch.zeros(200, 500).masked_fill(scores.isinf(), -torch.inf), 1.0, 1.0)
    assert bool((tokens % 2 == 1).all()) and len(set(tokens.tolist())) > 100


def test_of_an_empty_nucleus_the_likeliest_token_is_drawn() -> None:
    scores = torch.randn(50, 300)
    assert drawn(scores, 1.0, 0.0).tolist() == scores.argmax(-1).tolist()


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf])
def test_logits_that_are_no_distribution_are_refused(broken: float) -> None:
    scores = torch.zeros(3, 20)
    scores[1] = broken
    with pytest.raises(UnbindError, match="logits are not finite"):
        Nucleus(1.0, 0.9)(torch.zeros(3, 1, dtype=torch.int64), scores)


def test_draws_follow_torch_s_generator() -> None:
    scores = torch.randn(50, 300, generator=torch.Generator().manual_seed(2))
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(drawn(scores, 1.0, 0.9).tolist())
    assert found[0] == found[1] != found[2]


def test_half_precision_is_drawn_from_in_single() -> None:
    torch.manual_seed(5)
    scores = torch.full((2000, 1000), 0.0, dtype=torch.bfloat16)
    tokens = drawn(scores, 1.0, 0.99)
    assert int(tokens.max()) > 900 and int(tokens.min()) < 100
