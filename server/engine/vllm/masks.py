"""Grammars in the model's processes: a logits processor that leaves each answer's next token what its grammar allows.

vLLM's own structured outputs would tell log-probabilities after the mask, and could not go on in the middle of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from server.engine.grammars import Constraint, Grammars, narrow


class GrammarMasks(AdapterLogitsProcessor):  # type: ignore[misc]
    """Loaded by vLLM in each process of the model."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        model = vllm_config.model_config
        ends = frozenset(vllm_config.additional_config["unbind"]["ends"])
        self._grammars = Grammars(AutoTokenizer.from_pretrained(model.model), model.get_vocab_size(), ends)
        self.needs: Callable[[bool], None] = lambda _: None  # is told whether anybody in the batch has a grammar

    def is_argmax_invariant(self) -> bool:
        """A mask changes what is likeliest."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """As ever, before vLLM settles what this batch's sampling needs."""
        super().update_state(batch_update)
        self.needs(bool(self.req_info))

    def new_req_logits_processor(self, params: SamplingParams) -> Masked | None:
        """For a request with a grammar, which the engine has compiled before."""
        asked = params.extra_args or {}
        if "grammar" not in asked:
            return None
        return Masked(self._grammars.of(asked["grammar"]).begin(), asked["done"], asked["or_end"])


class Masked:
    """One leg of an answer. ``done``: tokens of the answer that the prompt ends with; ``or_end``: see ``Constraint.allowed``."""

    def __init__(self, constraint: Constraint, done: int, or_end: bool) -> None:
        self._constraint, self._done, self._or_end = constraint, done, or_end
        self._seen = -1

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
        """Mask one row [V] in place."""
        if self._seen < 0:
            self._seen = 0
            self._take(prompt[len(prompt) - self._done :])
        self._take(output[self._seen :])
        self._seen = len(output)
        narrow(logits, self._constraint.allowed(or_end=self._or_end))
        return logits

    def _take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._constraint.take(token)
