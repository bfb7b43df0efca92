"""Completions by drafts are those of decoding, whatever the edit and whatever the draft, and are decoded once at most."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.core.conftest import LAYER, ROWS, opening_on_some
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import edit_of
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import encode, pad_id
from unbind_core.evaluation import drafts
from unbind_core.evaluation.completions import retain_prompts
from unbind_core.evaluation.drafts import Drafts
from unbind_core.evaluation.replay import Replay
from unbind_core.module import UnbindModule
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import Batch, Window, batches

COUNT = 24


def decoded(
    loaded: LoadedModel, module: UnbindModule | None, prompts: list[list[int]], end: int | None
) -> list[list[int]]:
    """The same completions token by token."""
    bank = edit_of(module, torch.device("cpu"))[0] if module else None
    return complete(
        loaded.model,
        prompts,
        Sampling(COUNT),
        pad=pad_id(loaded.tokenizer),
        end=end,
        editing=lambda: attach(loaded.model, bank) if bank else nullcontext(),
    )


def asked(loaded: LoadedModel) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts with drafts of all kinds: known by heart to the end or half-way, injected, of another text, empty, long ago ended."""
    whole = [encode(loaded.tokenizer, row.text) for row in ROWS]
    prompts, _ = retain_prompts(loaded.tokenizer, ROWS, range(len(ROWS)))
    known = decoded(loaded, None, prompts, None)
    targets = [
        *known[:3],
        known[3][:7],
        [*known[4][:9], *whole[4][:20]],
        *whole[5:8],
        [],
        known[9] * 9,
    ]
    prompts.append(prompts[0] + known[0][:6])
    targets.append(known[0][6:])
    return prompts, targets


@pytest.mark.parametrize("kind", ["none", "paper", "network", "windowed network"])
@pytest.mark.parametrize("ends", [False, True])
def test_drafts_give_what_decoding_gives(tiny: LoadedModel, kind: str, ends: bool) -> None:
    prompts, targets = asked(tiny)
    module = None if kind == "none" else opening_on_some(tiny, kind)
    end = decoded(tiny, module, prompts, None)[1][5] if ends else None
    known = Drafts(tiny.model, LAYER, pad=pad_id(tiny.tokenizer), end=end)
    expected = decoded(tiny, module, prompts, end)
    assert known.complete(module, prompts, targets, COUNT) == expected
    assert known.complete(module, prompts[3:5], targets[3:5], 8) == [tokens[:8] for tokens in expected[3:5]]
    if ends:
        assert any(len(tokens) < COUNT for tokens in expected)
    if module is not None:
        assert ends or expected != decoded(tiny, None, prompts, end)
        other = replace(module, kappa=module.kappa / 3)
        assert known.complete(other, prompts, targets, COUNT) == decoded(tiny, other, prompts, end)
    assert known.complete(None, prompts, targets, COUNT) == decoded(tiny, None, prompts, end)


@pytest.mark.parametrize("kind", ["none", "network"])
def test_states_kept_elsewhere_spare_a_pass_and_change_nothing(
    tiny: LoadedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, targets = asked(tiny)
    module = None if kind == "none" else opening_on_some(tiny, kind)
    pad = pad_id(tiny.tokenizer)
    windows = [
        Window((*prompt, *target), len(prompt), i)
        for i, (prompt, target) in enumerate(zip(prompts, targets, strict=True))
        if target and i != 1
    ]
    replay = Replay(tiny.model, windows, [LAYER], pad=pad)
    passed: list[Batch] = []
    monkeypatch.setattr(drafts, "batches", lambda *args, **options: _noted(passed, args, options))
    known = Drafts(tiny.model, LAYER, pad=pad, end=None, replay=replay)
    assert known.complete(module, prompts, targets, COUNT) == decoded(tiny, module, prompts, None)
    seen = {window.ids for window in windows}
    new = {window.ids for batch in passed for window in batch.windows}
    assert (*prompts[1], *targets[1]) in new and not new & seen


def _noted(passed: list[Batch], args: Any, options: Any) -> list[Batch]:
    found = list(batches(*args, **options))
    passed += found
    return found


def test_what_was_decoded_once_is_a_draft(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, targets = asked(tiny)
    known, module = Drafts(tiny.model, LAYER, pad=pad_id(tiny.tokenizer), end=None), opening_on_some(tiny, "network")
    expected = [known.complete(one, prompts, targets, COUNT) for one in (None, module)]
    monkeypatch.setattr(drafts, "complete", lambda *_, **__: pytest.fail("it decodes again"))
    assert [known.complete(one, prompts, targets, COUNT) for one in (None, module)] == expected
    weaker = replace(module, kappa=0.0)
    assert known.complete(weaker, prompts, targets, COUNT) == expected[0]


def test_paths_that_are_more_than_memory_should_hold_are_dropped_and_come_out_the_same(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, (prompts, targets) = opening_on_some(tiny, "network"), asked(tiny)

    def bytes_kept(made: Drafts) -> int:
        return sum(one.states.numel() * one.states.element_size() for one in made._batches)

    def both(made: Drafts) -> list[list[list[int]]]:
        return [made.complete(one, prompts, targets, COUNT) for one in (None, module, None)]

    whole = Drafts(tiny.model, LAYER, pad=pad_id(tiny.tokenizer), end=None)
    expected = both(whole)
    most = bytes_kept(whole) // 4
    monkeypatch.setattr(drafts, "MOST_KEPT", most)
    made = Drafts(tiny.model, LAYER, pad=pad_id(tiny.tokenizer), end=None)
    assert both(made) == expected
    assert bytes_kept(made) <= 3 * most  # what is left over, and one group with its continuations
