"""The head is applied to a few positions after others where a model's vocabulary is large, and everything comes out the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.conftest import FAMILIES, LAYER, ROWS, TinyCheckpoint, opening_on_some
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank, edit_of
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.encoding import pad_id
from unbind_core.evaluation.drafts import Drafts
from unbind_core.evaluation.replay import Replay
from unbind_core.evaluation.verify import perplexity
from unbind_core.running import vocabulary
from unbind_core.running.capture import capture, capture_nll
from unbind_core.windows import Window, make_batch, retain_windows

LAYERS = [0, 1, 2]
PART = 40  # positions: more logits than the head has weights


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: TinyCheckpoint) -> LoadedModel:
    return load_model(tiny_checkpoint("qwen2"))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "MOST_LOGITS", PART * 381)
        yield patch


def windows(count: int = 3) -> list[Window]:
    generator = torch.Generator().manual_seed(0)
    return [Window(tuple(torch.randint(5, 300, (20 + i,), generator=generator).tolist()), 4, i) for i in range(count)]


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has whose last dimension is the vocabulary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.found = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() > 1 and out.shape[-1] == self.width:
            self.found = max(self.found, out.numel())
        return out


@pytest.mark.parametrize("family", FAMILIES)
def test_states_gradients_and_likelihoods_are_those_of_the_whole(
    family: str, tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = load_model(tiny_checkpoint(family)).model, make_batch(windows(), 0)
    whole, (states, nll) = capture(model, batch, LAYERS), capture_nll(model, batch, [1])
    monkeypatch.setattr(vocabulary, "MOST_LOGITS", PART * vocabulary.vocabulary(model))
    parts, (same, in_parts) = capture(model, batch, LAYERS), capture_nll(model, batch, [1])
    for layer in LAYERS:
        torch.testing.assert_close(parts.gradients[layer], whole.gradients[layer], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(parts.states[layer], whole.states[layer], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.nll, whole.nll)
    assert list(same) == [1] and torch.equal(same[1], states[1])
    torch.testing.assert_close(in_parts, nll)


def test_no_tensor_of_positions_times_vocabulary_is_made(loaded: LoadedModel, small_parts: pytest.MonkeyPatch) -> None:
    module, pad = opening_on_some(loaded, "network"), pad_id(loaded.tokenizer)
    every = retain_windows(loaded.tokenizer, ROWS, range(len(ROWS)))
    with Largest(381) as seen:
        replay = Replay(loaded.model, every, [LAYER], pad=pad)
        replay.run(edit_of(module, torch.device("cpu"))[1], LAYER, kl_budget=float("inf"))
        capture(loaded.model, make_batch(every, pad), LAYERS)
        perplexity(loaded.model, every, pad)
    assert 0 < seen.found <= PART * 381


def test_trials_and_drafts_come_out_the_same(loaded: LoadedModel, small_parts: pytest.MonkeyPatch) -> None:
    module, pad = opening_on_some(loaded, "network"), pad_id(loaded.tokenizer)
    selection = edit_of(module, torch.device("cpu"))[1]
    every = retain_windows(loaded.tokenizer, ROWS, range(len(ROWS)))
    prompts, targets = [list(w.ids[:12]) for w in every], [list(w.ids[12:30]) for w in every]
    bank = ModuleBank.of([module], torch.device("cpu"))

    def measured() -> tuple[list[float], list[list[int]]]:
        replay = Replay(loaded.model, every, [LAYER], pad=pad)
        trial = replay.run(selection, LAYER, kl_budget=float("inf"))
        edited = perplexity(loaded.model, every, pad, editing=lambda: attach(loaded.model, bank))
        drafts = Drafts(loaded.model, LAYER, pad=pad, end=None)
        figures = [trial.nll, trial.kl, replay.base_nll, replay.screen_kl(selection, LAYER), edited]
        return figures, drafts.complete(module, prompts, targets, 8)

    in_parts, drafted = measured()
    small_parts.undo()
    whole, as_before = measured()
    assert whole[1] > 0.01  # the edit does something
    assert in_parts == pytest.approx(whole, rel=1e-4)
    assert drafted == as_before
