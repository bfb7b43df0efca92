"""Grammars in the model's processes: a logits processor that leaves each answer's next token what its grammar allows.

vLLM's own structured outputs would tell log-probabilities after the mask, and could not go on in the middle of an answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from server.engine.grammars import Constraint, Grammars, narrow

log = logging.getLogger("unbind.engine")
T = TypeVar("T")


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
        """For a request with a grammar, which the engine has compiled before, within its seconds; here it may take longer."""
        asked = params.extra_args or {}
        if "grammar" not in asked:
            return None
        return Masked(lambda: self._begun(asked["grammar"], asked["owner"]), asked["done"], asked["or_end"])

    def _begun(self, source: str, owner: str) -> Constraint:
        return self._grammars.of(source, seconds=math.inf, owner=owner).begin()


class Masked:
    """One leg of an answer. ``done``: tokens of the answer that the prompt ends with; ``or_end``: see ``Constraint.allowed``.

    Where the grammar cannot be had or cannot go on, tokens stay as they are: what is raised here would end the process and every
    request in it, and the engine, which follows the answer too, ends this one at the first token that does not fit.
    """

    def __init__(self, begin: Callable[[], Constraint], done: int, or_end: bool) -> None:
        self._done, self._or_end = done, or_end
        self._seen = -1
        self._constraint = _survived(begin)

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
        """Mask one row [V] in place."""
        allowed = _survived(lambda: self._allowed(prompt, output))
        if allowed is None:
            self._constraint = None
        else:
            narrow(logits, allowed)
        return logits

    def _allowed(self, prompt: Sequence[int], output: Sequence[int]) -> NDArray[np.bool_] | None:
        if self._constraint is None:
            return None
        if self._seen < 0:
            self._seen = 0
            self._take(prompt[len(prompt) - self._done :])
        self._take(output[self._seen :])
        self._seen = len(output)
        return self._constraint.allowed(or_end=self._or_end)

    def _take(self, tokens: Sequence[int]) -> None:
        assert self._constraint is not None
        for token in tokens:
            self._constraint.take(token)


def _survived(work: Callable[[], T | None]) -> T | None:
    """What ``work`` gives; None where it raises, be it a panic of the library's Rust, which is no Exception."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        log.exception("a grammar cannot go on in the model's processes")
        return None
