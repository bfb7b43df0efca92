"""``complete``: rows that end leave the batch, and what the others write stays the same."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tests.core.applying.test_hooks_gates import remembering_module
from tests.core.conftest import FAMILIES, TinyCheckpoint, bank_of
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.running.generation import Sampling, complete

NEW = 40
PAD = 1


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, 300) for _ in range(draw.randrange(3, 20))] for _ in range(count)]


def alone(loaded: LoadedModel, bank: ModuleBank, prompt: list[int]) -> list[int]:
    """Greedy tokens of one prompt by one call of the library's ``generate``, with nothing that could end it."""
    ids = torch.tensor([prompt])
    with torch.no_grad(), attach(loaded.model, bank):
        out = loaded.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_end_leave_the_batch_and_the_others_go_on_as_alone(
    tiny_checkpoint: TinyCheckpoint, family: str
) -> None:
    loaded = load_model(tiny_checkpoint(family))
    bank = bank_of(remembering_module(loaded, "n", 1, window=5))
    asked = prompts(9)
    whole = [alone(loaded, bank, prompt) for prompt in asked]
    # The token that most rows come to, and so end with; at different places, or the batch would shrink once only.
    end, _ = Counter(token for row in whole for token in set(row)).most_common(1)[0]
    wanted = [row[: row.index(end)] if end in row else row for row in whole]
    assert len({len(row) for row in wanted}) > 1
    found = complete(
        loaded.model,
        asked,
        Sampling(NEW),
        pad=PAD,
        end=end,
        editing=lambda: attach(loaded.model, bank),
        batch_tokens=400,
    )
    assert found == wanted


def test_sampling_is_the_same_for_a_seed_and_ends_where_it_should(tiny: LoadedModel) -> None:
    asked = prompts(12)
    end = Counter(token for row in complete(tiny.model, asked, Sampling(NEW, 1.0), pad=PAD, end=None) for token in row)
    (token, _), *_ = end.most_common(1)
    once, again = (complete(tiny.model, asked, Sampling(NEW, 1.0, seed=3), pad=PAD, end=token) for _ in range(2))
    other = complete(tiny.model, asked, Sampling(NEW, 1.0, seed=4), pad=PAD, end=token)
    assert once == again != other
    assert all(token not in row and len(row) <= NEW for row in once)
    assert any(len(row) < NEW for row in once)


@pytest.mark.parametrize("new", [1, 3, 4, 5, 8, 9, 17])
def test_no_more_tokens_than_asked_for_and_no_fewer(tiny: LoadedModel, new: int) -> None:
    assert {len(row) for row in complete(tiny.model, prompts(3), Sampling(new), pad=PAD, end=None)} == {new}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("repetition_penalty", 5.0),
        ("no_repeat_ngram_size", 1),
        ("suppress_tokens", list(range(150))),
        ("num_beams", 3),
        ("cache_implementation", "static"),
    ],
)
def test_a_checkpoints_own_settings_hide_nothing(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, setting: str, value: object
) -> None:
    plain = complete(tiny.model, prompts(4), Sampling(NEW), pad=PAD, end=None)
    assert any(len(set(row)) < len(row) for row in plain)  # with a penalty it would not repeat itself
    assert any(token < 150 for row in plain for token in row)
    monkeypatch.setattr(tiny.model.generation_config, setting, value)
    own = tiny.model.generation_config
    assert complete(tiny.model, prompts(4), Sampling(NEW), pad=PAD, end=None) == plain
    assert tiny.model.generation_config is own


def test_the_head_is_given_states_that_lie_together(tiny_checkpoint: TinyCheckpoint) -> None:
    """Of a view of all positions' states torch makes a product for each row, in bfloat16 with a copy of the matrix for each."""
    loaded, together = load_model(tiny_checkpoint("qwen2")), []
    head = loaded.model.get_output_embeddings()  # type: ignore[operator]
    hook = head.register_forward_hook(lambda _, given, __: together.append(given[0].is_contiguous()))
    complete(loaded.model, prompts(3), Sampling(max_new_tokens=6), pad=PAD, end=None)
    hook.remove()
    assert len(together) == 6 and all(together)
