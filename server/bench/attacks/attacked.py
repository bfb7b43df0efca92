"""The systems that are attacked, what an attacker has in hand, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.passes import Pass
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import pad_id
from unbind_core.module import UnbindModule
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running.generation import Sampling, complete
from unbind_core.running.recording import frozen, recording
from unbind_core.windows import Batch, Window, batches

Ids = Sequence[int]


@dataclass(frozen=True)
class Material:
    """What an attacker has: the rows' prompts (where an attack says so, the rows), and ordinary code that nobody protects."""

    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[ForgetRow]
    ordinary: Sequence[RetainRow]


@dataclass(frozen=True)
class Ask:
    """One question: ``prompt`` is sent, ``target`` is what of row ``row`` must not come back."""

    row: int
    prompt: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What came back. ``chosen``: of an attack that is told the target as it goes, whether each token of it was the likeliest."""

    ask: Ask
    output: tuple[int, ...] = ()
    chosen: tuple[bool, ...] | None = None


class Attacked(Protocol):
    """What an attack meets: something that completes prompts, serves log-probabilities, and may have gates."""

    def complete(
        self, prompts: Sequence[Ids], sampling: Sampling, *, processors: Sequence[LogitsProcessor] = ()
    ) -> list[list[int]]:
        """Completions, each up to the end token; ``processors`` are the client's own."""

    def served(self, texts: Sequence[Ids]) -> Iterator[tuple[int, Tensor]]:
        """(index, log-probabilities FP32 [T,V]) of each of ``texts``: row t is served for what follows token t."""

    def gates(self, texts: Sequence[Ids]) -> list[Tensor]:
        """bool [T] of each of ``texts``: where a gate is open; nowhere without one."""


@dataclass(frozen=True)
class System:
    """A model and what is applied to it: nothing, or modules with the strength that a request has them with."""

    name: str
    loaded: LoadedModel
    modules: tuple[UnbindModule, ...] = ()
    strength: float = 1.0

    def with_strength(self, strength: float) -> System:
        """The same, asked for with another strength."""
        return replace(self, strength=strength)

    def editing(self) -> Callable[[], AbstractContextManager[object]]:
        """What is entered around passes of the model."""
        if not self.modules:
            return nullcontext
        model, strengths = self.loaded.model, {module.name: self.strength for module in self.modules}
        bank = ModuleBank.of(self.modules, next(model.parameters()).device)
        return lambda: attach(model, bank, strengths)

    def complete(
        self,
        prompts: Sequence[Ids],
        sampling: Sampling,
        *,
        processors: Sequence[LogitsProcessor] = (),
    ) -> list[list[int]]:
        """Completions, each up to the end token."""
        tokenizer = self.loaded.tokenizer
        return complete(
            self.loaded.model,
            prompts,
            sampling,
            pad=pad_id(tokenizer),
            end=tokenizer.eos_token_id,
            editing=self.editing(),
            processors=processors,
            stage=f"{self.name}: completions",
        )

    def served(self, texts: Sequence[Ids]) -> Iterator[tuple[int, Tensor]]:
        """(index, log-probabilities FP32 [T,V]) of each of ``texts``: row t is served for what follows token t."""
        editing, model = self.editing(), self.loaded.model
        for batch in self._batches(texts):
            with torch.no_grad(), frozen(model), editing():  # left before anything is given out: others share the model
                logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
            for window, row in zip(batch.windows, logits, strict=True):
                yield window.row, row[: len(window.ids)].float().log_softmax(-1)

    def gates(self, texts: Sequence[Ids]) -> list[Tensor]:
        """bool [T] of each of ``texts``: where the gate of a module is open; nowhere without one."""
        found = [torch.zeros(len(ids), dtype=torch.bool) for ids in texts]
        model, layers = self.loaded.model, sorted({module.layer for module in self.modules})
        if not layers:
            return found
        bank = ModuleBank.of(self.modules, next(model.parameters()).device)
        selection = bank.select([dict.fromkeys(bank.names, 1.0)])
        assert selection is not None
        with torch.no_grad(), frozen(model):
            for batch in self._batches(texts):
                with recording(model, layers) as states:
                    model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False)
                for layer in layers:
                    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
                    edit = selection.edit(layer, states[layer], self.looked_at(batch, positions))
                    opened = torch.stack([count.gate.any(-1) for count in edit.counts]).any(0).cpu()
                    for window, row in zip(batch.windows, opened, strict=True):
                        found[window.row] |= row[: len(window.ids)]
        return found

    def looked_at(self, batch: Batch, positions: Tensor) -> Pass:
        """As what gates see ``batch``, whose states stand at ``positions`` int64 [B,T]."""
        return Pass(real=batch.attention_mask.bool())

    def _batches(self, texts: Sequence[Ids]) -> Iterator[Batch]:
        windows = [Window(tuple(ids), 1, index) for index, ids in enumerate(texts)]
        return batches(windows, pad_id(self.loaded.tokenizer), device=next(self.loaded.model.parameters()).device)
