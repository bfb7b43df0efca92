"""What stands in for the model: logits that a script writes, behind the engine's own step.

The scheduler, the sampler, the guard, the streams and the publishing are the server's; only the forward pass is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from server.engine.embedded.runner import Runner
from server.engine.embedded.scheduler import Chunk, Plan, Scheduler
from server.engine.embedded.step import Stepper
from server.engine.flights import flight_of
from server.engine.request import Delta, Flight, GenerationRequest
from unbind_core.cpu.lanes import Lanes

MAX_LENGTH = 4096


class Script(Protocol):
    """Writes one request's logits."""

    def wish(self, output: Sequence[int]) -> Mapping[int, float]:
        """Token -> logit after ``output``; all others are about 0. Asked once for each token, in order."""

    def wish_at(self, position: int) -> Mapping[int, float]:
        """The same after each prompt token, for log-probabilities of the prompt."""


class _Scripted:
    """A ``Runner`` whose passes are asked of the requests' scripts."""

    def __init__(self, vocabulary: int, scripts: Mapping[Flight, Script]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._usual = torch.randn(vocabulary, generator=generator)
        self._scripts = scripts

    mixes = True

    def forward(self, plan: Plan) -> Tensor:
        """As ``Runner.forward``."""
        rows = []
        for chunk in plan.prefill:
            before = range(chunk.start, chunk.start + chunk.asked - 1)
            rows += [self._scripts[chunk.flight].wish_at(position) for position in before]
            rows.append(self._last(chunk))
        return self._rows([*rows, *map(self._wish, plan.decode)])

    def _last(self, chunk: Chunk) -> Mapping[int, float]:
        if chunk.completes:
            return self._wish(chunk.flight)
        at_last = chunk.start + chunk.count - 1
        return self._scripts[chunk.flight].wish_at(at_last) if chunk.asked > 1 else {}

    def clear(self, slot: int) -> None:
        """Nothing is kept."""

    def copy(self, source: int, target: int, count: int) -> None:
        """Nothing is kept."""

    def recover(self) -> None:
        """Nothing was taken."""

    def _wish(self, flight: Flight) -> Mapping[int, float]:
        return self._scripts[flight].wish(flight.output)

    def _rows(self, wishes: Sequence[Mapping[int, float]]) -> Tensor:
        logits = self._usual.repeat(len(wishes), 1)
        places = [(row, token) for row, wish in enumerate(wishes) for token in wish]
        if places:
            rows, tokens = zip(*places, strict=True)
            values = [value for wish in wishes for value in wish.values()]
            logits[torch.tensor(rows), torch.tensor(tokens)] = torch.tensor(values)
        return logits


class _NoModules:
    """In the place of the table of modules."""

    def collect(self) -> None:
        """There is nothing to collect."""


class Desk:
    """The engine's step over scripts: ``ask`` as often as wanted, then ``run`` until everything is answered."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, slots: int) -> None:
        self._tokenizer = tokenizer
        self.ends = frozenset({int(cast(Any, tokenizer).eos_token_id)})
        self._scripts: dict[Flight, Script] = {}
        runner = _Scripted(len(tokenizer), self._scripts)
        self.scheduler = Scheduler(slots, MAX_LENGTH, slots, chunk_tokens=MAX_LENGTH)
        lanes = Lanes(torch.device("cpu"), 1)
        self._stepper = Stepper(self.scheduler, cast(Runner, runner), lanes, cast(Any, _NoModules()))

    def ask(self, request: GenerationRequest, script: Script, hear: Callable[[Delta], None]) -> None:
        """``hear`` is told each part of the answer."""

        def deliver(delta: Delta) -> None:
            if delta.error is not None:
                raise RuntimeError(delta.error)
            hear(delta)
            if delta.finish_reason is not None:
                del self._scripts[flight]

        flight = flight_of(request, self._tokenizer, self.ends, deliver)
        self.scheduler.check_fits(len(request.prompt), request.sampling.max_tokens)
        self._scripts[flight] = script
        self.scheduler.waiting.append(flight)

    @property
    def busy(self) -> int:
        """Answers that have not ended."""
        return len(self._scripts)

    def run(self, until: int = 0) -> None:
        """Step until at most so many answers have not ended."""
        while self.busy > until:
            self._stepper.step(lambda: None)
