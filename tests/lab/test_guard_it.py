"""GUARD-IT: silhouettes by their definition, directions as its authors have them, a rotation of what is like a row alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from unbind_core.architecture import decoder_layers
from unbind_core.windows import Window, forget_prompt, forget_windows
from unbind_lab.filters.guard_it import GUARD_IT, Redirection, _turning, clustered, redirection, silhouette
from unbind_lab.filters.models import FULL
from unbind_lab.setting import Bench, Setting


def by_definition(points: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Mean over points of (b - a) / max(a, b): a the mean distance to others of its cluster, b to the nearest other cluster."""
    found = []
    for i, (point, own) in enumerate(zip(points, labels, strict=True)):
        apart = np.linalg.norm(points - point, axis=1)
        others = (labels == own) & (np.arange(len(points)) != i)
        if not others.any():
            found.append(0.0)
            continue
        a, b = apart[others].mean(), min(apart[labels == one].mean() for one in set(labels) - {own})
        found.append((b - a) / max(a, b))
    return float(np.mean(found))


def test_silhouettes_are_as_defined_and_clusters_are_found() -> None:
    generator = np.random.default_rng(0)
    for k in (2, 3, 5):
        points, labels = generator.normal(size=(30, 4)), generator.integers(0, k, 30)
        labels[0] = k  # alone in its cluster
        mine = silhouette(torch.from_numpy(points), torch.from_numpy(labels))
        assert mine == pytest.approx(by_definition(points, labels))
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    truth = torch.arange(30) % 3
    found = clustered(centres[truth] + torch.randn(30, 2, generator=torch.Generator().manual_seed(1)), 0)
    assert len({(int(a), int(b)) for a, b in zip(truth, found, strict=True)}) == 3
    assert clustered(torch.zeros(1, 4), 0).tolist() == [0]


def test_a_direction_is_orthogonal_to_what_is_retained_and_as_long_as_states() -> None:
    generator = torch.Generator().manual_seed(0)
    retain = torch.randn(200, 8, generator=generator) + 3
    forget = torch.randn(12, 8, generator=generator) + torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 0])
    found = redirection(forget, retain, 0)
    assert (found.directions @ found.centre).abs().max() < 1e-3
    length = float(forget.norm(dim=1).mean() + retain.norm(dim=1).mean()) / 2
    assert float(found.directions.norm(dim=1).mean()) == pytest.approx(length, rel=0.05)
    assert float((found.away(retain) != 0).any(1).float().mean()) <= 0.02
    assert bool((found.away(forget) != 0).any(1).all())


def test_states_keep_their_length_and_a_text_that_is_like_no_row_its_states(setting: Setting) -> None:
    bench = Bench(setting)
    model, layer = bench.full.model, 1
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    states: list[torch.Tensor] = []
    watch = lambda *found: states.append(found[2][0] if isinstance(found[2], tuple) else found[2])  # noqa: E731
    means: list[torch.Tensor] = []

    class Watched(Redirection):
        def away(self, given: torch.Tensor) -> torch.Tensor:
            means.append(given)
            return torch.stack([self.directions[0], torch.zeros_like(self.directions[0])])

    size = bench.full.identity.hidden_size
    found = Watched(torch.zeros(size), torch.zeros(1, size), torch.ones(1, size), 0.0)
    for turning in (False, True):
        with torch.no_grad():
            if turning:
                with _turning(model, layer, found, 0.5):
                    handle = decoder_layers(model)[layer].register_forward_hook(watch)
                    model(input_ids=ids, attention_mask=mask)
            else:
                handle = decoder_layers(model)[layer].register_forward_hook(watch)
                model(input_ids=ids, attention_mask=mask)
        handle.remove()
    before, after = states
    assert torch.allclose(means[0][1], before[1, :3].mean(0), atol=1e-6)  # without padding
    assert torch.equal(after[1], before[1])
    assert torch.allclose(after[0].norm(dim=-1), before[0].norm(dim=-1), rtol=1e-4)
    expected = before[0] - 0.5
    assert torch.allclose(after[0], expected * (before[0].norm(dim=-1) / expected.norm(dim=-1))[:, None], atol=1e-5)


def test_an_answer_is_turned_as_its_prompt_was(setting: Setting) -> None:
    bench = Bench(setting)
    plain = FULL.build(bench, bench.forget, {}, Path())
    served = GUARD_IT.build(bench, bench.forget, {"layer": 0.5, "strength": 1.0}, Path())
    prompt, _ = forget_prompt(plain.tokenizer, bench.forget[0], "plain")
    asked = [prompt, *(window.ids[:8] for window in forget_windows(plain.tokenizer, bench.forget, [1, 2]))]
    answers = served.complete(asked, 10)
    assert answers == [served.complete([one], 10)[0] for one in asked]
    windows = [
        Window((*window.ids,), window.first_target, 0) for window in forget_windows(plain.tokenizer, bench.forget, [0])
    ]
    (_, own), (_, before) = next(served.log_probabilities(windows)), next(plain.log_probabilities(windows))
    assert not torch.allclose(own, before, atol=1e-3)
