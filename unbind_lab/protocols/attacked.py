"""A system of the lab as attacks meet it: a client's prompts, biases and questions for log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from server.bench.attacks.attacked import Ids
from unbind_core.running.generation import Sampling
from unbind_core.windows import Window
from unbind_lab.served import FLOOR, Served


@dataclass(frozen=True)
class LabSystem:
    """Gates are told by none, so that every system is asked for alike: an undo is learned from all positions of a text."""

    asked: Served

    def complete(
        self, prompts: Sequence[Ids], sampling: Sampling, *, processors: Sequence[LogitsProcessor] = ()
    ) -> list[list[int]]:
        """Completions, each up to the end token; empty where the prompt is refused."""
        return self.asked.complete(prompts, sampling, processors=processors)

    def served(self, texts: Sequence[Ids]) -> Iterator[tuple[int, Tensor]]:
        """(index, log-probabilities FP32 [T,V]) of each of ``texts``, each sent whole as a prompt: of one that is refused the end
        is certain everywhere, and one that is rewritten is scored as it was sent.
        """
        # A position more: what is served after the last token is asked for as well.
        windows = [Window((*ids, ids[-1]), 1, index) for index, ids in enumerate(texts)]
        for index, found in self.asked.log_probabilities(windows):
            yield index, self._certain_end(found) if self._refused(texts[index]) else found

    def gates(self, texts: Sequence[Ids]) -> list[Tensor]:
        """bool [T] of each of ``texts``, all False."""
        return [torch.zeros(len(ids), dtype=torch.bool) for ids in texts]

    def _refused(self, ids: Ids) -> bool:
        refuses, tokenizer = self.asked.refuses, self.asked.tokenizer
        return refuses is not None and refuses(str(tokenizer.decode(list(ids), skip_special_tokens=True)))

    def _certain_end(self, found: Tensor) -> Tensor:
        ended = torch.full_like(found, FLOOR)
        ended[:, int(self.asked.tokenizer.eos_token_id or 0)] = 0.0
        return ended
