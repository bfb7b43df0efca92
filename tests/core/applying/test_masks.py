"""``attach`` where the model's mask is longer than what was read: Bloom's is as long as a cache of fixed size."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BloomConfig, BloomForCausalLM

from tests.core.applying.test_hooks_gates import remembering_module
from tests.core.conftest import bank_of, build_tokenizer
from unbind_core.applying.attach import attach
from unbind_core.architecture import LoadedModel, identify


def test_gates_open_alike_whatever_the_length_of_the_mask() -> None:
    tokenizer = build_tokenizer()
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=3, n_head=4, initializer_range=0.15)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = BloomForCausalLM(config).eval()
        ids = torch.randint(5, 300, (2, 9))
    tiny = LoadedModel(model, tokenizer, identify(model, tokenizer))
    bank = bank_of(remembering_module(tiny, "n", 1, window=5))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def first(**options: Any) -> torch.Tensor:
        """Logits behind the prompt and the tokens after it."""
        settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
        answer = model.generate(
            input_ids=ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings
        )
        return torch.stack(answer.logits)

    plain = first(cache_implementation="static")
    with attach(model, bank):
        expected = first()
        torch.testing.assert_close(first(cache_implementation="static"), expected, atol=1e-4, rtol=1e-4)
    assert (plain[0] - expected[0]).abs().max() > 0.01
