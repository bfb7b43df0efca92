"""A system as protocols meet it: it completes prompts, and says how likely it finds given tokens. Whatever it consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from unbind_core.encoding import encode_prompt, pad_id
from unbind_core.progress import ProgressCallback, silent
from unbind_core.rows import ForgetRow
from unbind_core.running.generation import Editing, Sampling, complete
from unbind_core.running.recording import frozen
from unbind_core.windows import MAX_WINDOW, Window, batches

FLOOR = -30.0  # log-probabilities below it count as this: what is barred would make every mean infinite


class Decoding(Protocol):
    """Changes logits by the tokens before them, at generation and under teacher forcing alike."""

    context: int  # tokens that it looks back at

    def shift(self, context: tuple[int, ...]) -> Tensor | None:
        """FP32 [V] to add to the logits of what follows ``context``, its last tokens; None for no change."""


@dataclass(frozen=True)
class Served:
    """``editing`` is around every pass; ``decoding`` changes logits; ``refuses`` says of a prompt that it gets no answer; ``cut``
    shortens an answer (prompt ids, answer ids); ``asked`` makes another prompt of a prompt's text. ``apart`` makes the same system
    of M_full and these sets of rows, of each after the other; of none it is M_full.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    editing: Editing = nullcontext
    decoding: Decoding | None = None
    refuses: Callable[[str], bool] | None = None
    cut: Callable[[Sequence[int], list[int]], list[int]] | None = None
    asked: Callable[[str], str] | None = None
    apart: Callable[[Sequence[Sequence[ForgetRow]], ProgressCallback], Served] | None = None

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        how: int | Sampling,
        progress: ProgressCallback = silent,
        *,
        processors: Sequence[LogitsProcessor] = (),
    ) -> list[list[int]]:
        """Answers without the end token, greedy ones where ``how`` is the most tokens; empty where the prompt is refused.

        ``processors`` are the client's own, as ``logit_bias`` is: they come after what the system does.
        """
        taken = [i for i, prompt in enumerate(prompts) if not self._refused(prompt)]
        answers: list[list[int]] = [[] for _ in prompts]
        found = complete(
            self.model,
            [self._asked(prompts[i]) for i in taken],
            how if isinstance(how, Sampling) else Sampling(how),
            pad=pad_id(self.tokenizer),
            end=self.tokenizer.eos_token_id,
            editing=self.editing,
            processors=(*(() if self.decoding is None else (_Processor(self.decoding),)), *processors),
            progress=progress,
        )
        for i, answer in zip(taken, found, strict=True):
            answers[i] = answer if self.cut is None else self.cut(prompts[i], answer)
        return answers

    def log_probabilities(self, windows: Sequence[Window]) -> Iterator[tuple[int, Tensor]]:
        """(index, FP32 [N,V]) of each window: natural log-probabilities at its N targets, none below FLOOR.

        What stands before a window's first target is its prompt: it may be refused, after which the end of the text is certain.
        """
        given = [self._window(i, window) for i, window in enumerate(windows)]
        device = next(self.model.parameters()).device
        for batch in batches(given, pad_id(self.tokenizer), device=device):
            with torch.no_grad(), frozen(self.model), self.editing():  # left before anything is given out
                logits = self.model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
            for window, row in zip(batch.windows, logits, strict=True):
                own = row[window.first_target - 1 : len(window.ids) - 1].float()
                original = windows[window.row]
                if original.first_target > 1 and self._refused(original.ids[: original.first_target]):
                    own = torch.full_like(own, 2 * FLOOR)
                    own[:, int(self.tokenizer.eos_token_id or 0)] = 0.0
                elif self.decoding is not None:
                    own = torch.stack(
                        [
                            _shifted(self.decoding, window.ids[: window.first_target + i], one)
                            for i, one in enumerate(own)
                        ]
                    )
                yield window.row, own.log_softmax(-1).nan_to_num(FLOOR).clamp(min=FLOOR)

    def _window(self, index: int, window: Window) -> Window:
        prompt = window.ids[: window.first_target]
        if self.asked is None or window.first_target <= 1:
            return Window(window.ids, window.first_target, index)
        asked = self._asked(prompt)
        return Window((*asked, *window.ids[window.first_target :]), len(asked), index)

    def _refused(self, prompt: Sequence[int]) -> bool:
        return self.refuses is not None and self.refuses(self.text(prompt))

    def _asked(self, prompt: Sequence[int]) -> list[int]:
        if self.asked is None:
            return list(prompt)
        return encode_prompt(self.tokenizer, self.asked(self.text(prompt)))[-MAX_WINDOW // 2 :]

    def text(self, ids: Sequence[int]) -> str:
        """The tokens as text, without special ones."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _shifted(decoding: Decoding, before: Sequence[int], logits: Tensor) -> Tensor:
    shift = decoding.shift(tuple(before[-decoding.context :]))
    return logits if shift is None else logits + shift.to(logits)


class _Processor(LogitsProcessor):
    """A ``Decoding`` as the library's ``generate`` takes it."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [B,V] after the ids [B,T]."""
        texts = input_ids[:, -self.decoding.context :].tolist()
        return torch.stack(
            [_shifted(self.decoding, text, row.float()) for text, row in zip(texts, scores, strict=True)]
        )
