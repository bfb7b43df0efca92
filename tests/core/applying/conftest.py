"""What tests of modules at work share: prompts, a bank, generation, and how many hooks a model carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from tests.core.conftest import bank_of, make_module
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel

PROMPTS = ("def add(first, second):", "class Reader:\n    def __init__(self, path", "for")


@pytest.fixture
def bank(tiny: LoadedModel) -> ModuleBank:
    return bank_of(make_module(tiny.identity, "a", 0), make_module(tiny.identity, "b", 2, seed=1))


def encoded(tiny: LoadedModel, prompts: Sequence[str] = PROMPTS) -> dict[str, Tensor]:
    tokens = tiny.tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}


def generate(tiny: LoadedModel, prompts: Sequence[str] = PROMPTS, **options: Any) -> list[list[int]]:
    """New tokens of each row, without what follows the end of a row."""
    model: Any = tiny.model
    inputs = encoded(tiny, prompts)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False} | options
    out = model.generate(**inputs, **settings)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def hooks_on(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
