"""``attach`` where one row holds several texts: gates that remember would take them for one, so it is refused, never left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.core.applying.conftest import PROMPTS
from tests.core.applying.test_hooks_gates import remembering_module
from tests.core.conftest import bank_of
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel
from unbind_core.errors import UnsupportedArchitecture


@pytest.fixture(scope="module")
def bank(tiny: LoadedModel) -> ModuleBank:
    return bank_of(remembering_module(tiny, "n", 0, window=5))


def test_continuous_batching_answers_with_the_refusal(tiny: LoadedModel, bank: ModuleBank) -> None:
    model: Any = tiny.model
    asked = {
        "inputs": [tiny.tokenizer(prompt)["input_ids"] for prompt in PROMPTS],
        "generation_config": GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
        "progress_bar": False,
    }
    implementation = model.config._attn_implementation
    try:
        with attach(model, bank):
            answers = model.generate_batch(**asked).values()
        assert len(answers) == len(PROMPTS)
        assert all("several texts" in answer.error and not answer.generated_tokens for answer in answers)
        assert all(answer.generated_tokens for answer in model.generate_batch(**asked).values())
    finally:
        model.set_attn_implementation(implementation)


def test_positions_that_begin_anew_in_a_row_are_refused(tiny: LoadedModel, bank: ModuleBank) -> None:
    ids = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(2))
    two = torch.cat((torch.arange(7), torch.arange(5)))[None]
    whole = torch.arange(12)[None]
    lengths = torch.tensor([0, 7, 12], dtype=torch.int32)
    with torch.no_grad(), attach(tiny.model, bank):
        expected = tiny.model(ids).logits
        assert torch.equal(tiny.model(ids, position_ids=whole).logits, expected)
        for packed in (
            {"position_ids": two},
            {"position_ids": two, "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths},
        ):
            with pytest.raises(UnsupportedArchitecture, match="several texts"):
                tiny.model(ids, use_cache=False, **packed)
