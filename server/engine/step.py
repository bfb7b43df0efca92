"""One step of the engine, in one breath: admit, run, sample, publish.

Called by the engine's thread, over and over, as long as anything waits or runs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from server.engine.modules import ModuleTable
from server.engine.request import Delta, Flight, Status, TokenLogprob
from server.engine.runner import Runner
from server.engine.sampler import logprobs, sample
from server.engine.scheduler import Plan, Scheduler

log = logging.getLogger("unbind.engine")


class Stepper:
    """What happens to the requests in the engine. Flights are handed their deltas; the caller posts them."""

    def __init__(self, scheduler: Scheduler, runner: Runner, modules: ModuleTable, end_ids: frozenset[int]) -> None:
        self.scheduler, self.runner, self.modules, self.end_ids = scheduler, runner, modules, end_ids
        self.steps = self.failures = 0

    def step(self, post: Callable[[], None]) -> None:
        """Admit, run, sample, publish; ``post`` sends off what a forward pass has made, before a prompt's begins."""
        self._drop_cancelled()
        for plan in self.scheduler.schedule().passes():
            if plan.prefill:
                post()
            self._advance(plan)
        self.modules.collect()
        self.steps += 1

    def _advance(self, plan: Plan) -> None:
        """One forward pass and what follows from it; a pass that raises fails its own requests and no others."""
        flights = [chunk.flight for chunk in plan.prefill] or list(plan.decode)
        try:
            logits = self._prefill(plan) if plan.prefill else self.runner.decode(plan.decode)
            self.scheduler.computed(plan)
            # an incomplete prompt draws no number, so that a seed means the same however it was cut into chunks
            rows = [i for i, flight in enumerate(flights) if flight.status is Status.RUNNING]
            ready = [flights[i] for i in rows]
            logits = logits if len(rows) == len(flights) else logits[rows]
            tokens, finite = sample(logits, ready) if rows else ([], [])
            scored = self._logprobs(logits, ready, tokens)
        except Exception as error:
            log.exception("a step of %d requests failed", len(flights))
            self._fail(flights, _reason(error))
            self.runner.recover()
            return
        for flight, token, sound in zip(ready, tokens, finite, strict=True):
            if sound:
                self._publish(flight, token, scored.get(flight, ()))
            else:
                self._fail([flight], "the model produced logits that are not finite; the request was dropped")

    def _prefill(self, plan: Plan) -> Tensor:
        """Logits [B,V] of each chunk's last position; those of every position are turned into log-probabilities."""
        if plan.prefill[0].flight.request.sampling.prompt_logprobs is None:
            return self.runner.prefill(plan.prefill)
        everywhere = self.runner.prefill(plan.prefill, everywhere=True)
        for row, chunk in enumerate(plan.prefill):
            flight = chunk.flight
            following = flight.prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
            wanted = flight.request.sampling.prompt_logprobs or 0
            flight.prompt_logprobs += logprobs(everywhere[row, : len(following)], following, wanted)
        return everywhere[torch.arange(len(plan.prefill)), [chunk.count - 1 for chunk in plan.prefill]]

    def _logprobs(
        self, logits: Tensor, flights: Sequence[Flight], tokens: Sequence[int]
    ) -> dict[Flight, tuple[TokenLogprob, ...]]:
        """For the requests that ask; the others cost nothing."""
        rows = [i for i, flight in enumerate(flights) if flight.request.sampling.logprobs is not None]
        if not rows:
            return {}
        wanted = [flights[i].request.sampling.logprobs or 0 for i in rows]
        found = logprobs(logits[rows], [tokens[i] for i in rows], max(wanted))
        return {
            flights[i]: (dataclasses.replace(entry, top=entry.top[:count]),)
            for i, entry, count in zip(rows, found, wanted, strict=True)
        }

    def _publish(self, flight: Flight, token: int, scored: tuple[TokenLogprob, ...]) -> None:
        """Append one token to its request, hand over what text is certain, and end the request where it ends."""
        sampling = flight.request.sampling
        first = not flight.output and sampling.prompt_logprobs is not None
        prompt = (None, *flight.prompt_logprobs) if first else ()
        if sampling.max_tokens == 0:
            self._finish(flight, Delta("", (), "length", prompt_logprobs=prompt))
            return
        flight.output.append(token)
        if token in self.end_ids and not sampling.ignore_eos:
            gates = (
                (flight.activations,) if flight.request.report else ()
            )  # what made the answer end is of interest too
            self._finish(flight, Delta(flight.text.flush(), (), "stop", prompt_logprobs=prompt, activations=gates))
            return
        text, stopped = flight.text.push(token)
        gates = (flight.activations,) if flight.request.report else ()
        if stopped:
            self._finish(flight, Delta(text, (token,), "stop", None, scored, prompt, gates))
        elif len(flight.output) >= sampling.max_tokens:
            self._finish(flight, Delta(text + flight.text.flush(), (token,), "length", None, scored, prompt, gates))
        else:
            flight.deliver(Delta(text, (token,), None, None, scored, prompt, gates))

    def _finish(self, flight: Flight, delta: Delta, keep: bool = True) -> None:
        self.scheduler.finish(flight, keep)
        flight.deliver(delta)

    def _drop_cancelled(self) -> None:
        for flight in [*self.scheduler.admitted, *self.scheduler.waiting]:
            if flight.cancelled:
                self._finish(flight, Delta("", (), "cancelled"))

    def end_all(self, reason: str) -> None:
        """End every request with an error."""
        for flight in [*self.scheduler.admitted, *self.scheduler.waiting]:
            self._finish(flight, Delta("", (), "error", reason), keep=False)

    def _fail(self, flights: Sequence[Flight], reason: str) -> None:
        for flight in flights:
            if flight.slot >= 0:
                self.runner.clear(flight.slot)
            self.failures += 1
            self._finish(flight, Delta("", (), "error", reason), keep=False)


def _reason(error: Exception) -> str:
    """Why a forward pass failed, for those whose requests it drops."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return (
            "the server ran out of memory in the model's forward pass; the request was dropped; send a shorter prompt, "
            "or start the server with fewer --max-slots, a lower --max-model-len or smaller --chunk-tokens"
        )
    return f"the model's forward pass failed ({type(error).__name__}); the request was dropped"


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer: the generation settings', as plain ``generate`` takes them, and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)
