"""One step of the engine, in one breath: admit, run, sample, publish.

Called by the engine's thread, over and over, as long as anything waits or runs.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from server.engine.answering import advanced, dropped, hand_over, hand_over_end, told
from server.engine.embedded.pace import Pace
from server.engine.embedded.runner import Runner
from server.engine.embedded.sampler import choose, logprobs
from server.engine.embedded.scheduler import LEAST_PASS, Chunk, Plan, Scheduler, side_by_side
from server.engine.modules import ModuleTable
from server.engine.request import Delta, Flight, Status, TokenLogprob, withheld_logprob
from unbind_core.cpu.lanes import Lanes

log = logging.getLogger("unbind.engine")


@dataclass(frozen=True)
class _Computed:
    """What a forward pass gave: of each request that is ready for it a token, whether its logits were finite, and its
    log-probability where that is wanted; or why the pass failed.
    """

    tokens: Mapping[Flight, tuple[int, bool]] = field(default_factory=dict)
    logprobs: Mapping[Flight, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    failure: str = ""


class Stepper:
    """What happens to the requests in the engine. Flights are handed their deltas; the caller posts them."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, lanes: Lanes, modules: ModuleTable, least_pass: int = LEAST_PASS
    ) -> None:
        self.scheduler, self.runner, self.lanes, self.modules = scheduler, runner, lanes, modules
        self._least_pass = least_pass
        self.pace = Pace(len(scheduler.slots))
        self.steps = self.failures = self.cancelled = 0

    def step(self, post: Callable[[], None]) -> None:
        """Admit, run, sample, publish; ``post`` sends off what a forward pass has made while others go on."""
        self._drop_cancelled()
        self._end_late_prompts()
        plan = self.scheduler.schedule()
        for flight, source in plan.copies:
            self.runner.copy(source, flight.slot, flight.cached_tokens)
        for chunk in plan.prefill:
            chunk.flight.begun_at = chunk.flight.begun_at or time.monotonic()
        self.pace.look(self.scheduler.full, time.monotonic())
        plans = plan.passes(self.lanes.count, self._least_pass, self.runner.mixes)
        work = [partial(self._compute, plan) for plan in plans]
        with closing(self.lanes.run(work, together=side_by_side(plans))) as passes:
            for _, parts in passes:
                for part, computed in parts:
                    self._settle(part, computed)
                if len(plans) > 1:
                    post()
        self.modules.collect()
        self.steps += 1

    def _compute(self, plan: Plan) -> list[tuple[Plan, _Computed]]:
        """One forward pass and its tokens, or where that fails one for each part of it, so that nobody fails for another; touches
        its own requests and no others, as another pass may run beside it.
        """
        try:
            logits = self.runner.forward(plan)
        except BaseException as error:  # panics of Rust are no Exception, and would end the engine's thread
            log.exception("a pass of %d requests failed", len(plan.flights))
            if len(parts := plan.passes(mixed=False)) > 1:
                self.runner.recover()
                return [pair for part in parts for pair in self._compute(part)]
            return [(plan, _Computed(failure=_reason(error)))]
        try:
            return [(plan, self._chosen(plan, logits))]
        except BaseException as error:
            log.exception("tokens of %d requests could not be chosen", len(plan.flights))
            return [(plan, _Computed(failure=_reason(error)))]

    def _chosen(self, plan: Plan, logits: Tensor) -> _Computed:
        """The tokens of a pass, and what is asked of its log-probabilities; ``logits`` [K,V] as ``Runner.forward`` gives them."""
        ready, rows, end = list[Flight](), list[int](), 0
        for chunk in plan.prefill:
            end += chunk.asked
            if chunk.flight.request.sampling.prompt_logprobs is not None:
                self._score(chunk, logits[end - chunk.count : end])
            if (
                chunk.completes
            ):  # an incomplete prompt draws no number, so that a seed means the same however it was cut
                ready.append(chunk.flight)
                rows.append(end - 1)
        ready, rows = [*ready, *plan.decode], [*rows, *range(end, len(logits))]
        logits = logits if len(rows) == len(logits) else logits[rows]
        tokens, finite = choose(logits, ready) if ready else ([], [])
        found = dict(zip(ready, zip(tokens, finite, strict=True), strict=True))
        return _Computed(found, self._logprobs(logits, ready, tokens))

    def _settle(self, plan: Plan, computed: _Computed) -> None:
        """What follows from a forward pass; one that failed fails its own requests and no others."""
        if computed.failure:
            self._fail(plan.flights, computed.failure)
            self.runner.recover()
            return
        self.scheduler.computed(plan)
        for flight, (token, sound) in computed.tokens.items():
            if not sound:
                self._fail([flight], "the model produced logits that are not finite; the request was dropped")
                continue
            try:
                self._publish(flight, token, computed.logprobs.get(flight, ()))
            except BaseException as error:  # of this answer's text, grammar or guard, and no other's
                log.exception("a token could not be published")
                self._fail([flight], dropped(error))

    @staticmethod
    def _score(chunk: Chunk, logits: Tensor) -> None:
        """Log-probabilities of a prompt's tokens, from the logits [T,V] behind each of a chunk's."""
        flight = chunk.flight
        following = flight.prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
        open_from = len(following) if flight.opened is None else max(0, flight.opened - chunk.start)
        told = following[:open_from]
        if told:
            scored = logprobs(logits[: len(told)], told, flight.request.sampling.prompt_logprobs or 0)
            flight.prompt_logprobs += scored if flight.guarding is None else flight.guarding.shown(scored)
        flight.prompt_logprobs += [withheld_logprob(token) for token in following[open_from:]]

    def _logprobs(
        self, logits: Tensor, flights: Sequence[Flight], tokens: Sequence[int]
    ) -> Mapping[Flight, tuple[TokenLogprob, ...]]:
        """For the requests that ask; the others cost nothing."""
        asking = [i for i, flight in enumerate(flights) if flight.request.sampling.logprobs is not None]
        rows = [i for i in asking if flights[i].opened is None]
        withheld = {flights[i]: (withheld_logprob(tokens[i]),) for i in asking if flights[i].opened is not None}
        if not rows:
            return withheld
        wanted = [flights[i].request.sampling.logprobs or 0 for i in rows]
        found = logprobs(logits[rows], [tokens[i] for i in rows], max(wanted))
        return withheld | {
            flights[i]: told(flights[i], dataclasses.replace(entry, top=entry.top[:count]))
            for i, entry, count in zip(rows, found, wanted, strict=True)
        }

    def _publish(self, flight: Flight, token: int, scored: tuple[TokenLogprob, ...]) -> None:
        """Append one token to its request, hand over what text is certain, and end the request where it ends."""
        delta = advanced(flight, token, scored)
        if delta.finish_reason is not None:
            self._finish(flight, delta)
        else:
            hand_over(flight, delta)

    def _finish(self, flight: Flight, delta: Delta, keep: bool = True) -> None:
        if flight.slot >= 0:
            self.pace.left(time.monotonic())
        self.scheduler.finish(flight, keep)
        hand_over_end(flight, delta)

    def _drop_cancelled(self) -> None:
        for flight in [*self.scheduler.admitted, *self.scheduler.waiting]:
            if flight.cancelled:
                self.cancelled += 1
                self._finish(flight, Delta("", (), "cancelled"))

    def _end_late_prompts(self) -> None:
        """What has been computed of them stays in their slots, so that the same prompt comes further next time. To warm up is
        to compute the prompt, however long it takes.
        """
        now = time.monotonic()
        for flight in self.scheduler.admitted:
            sampling = flight.request.sampling
            begun = flight.status is Status.PREFILLING and flight.begun_at
            if begun and sampling.prompt_seconds and not sampling.warms_up and now - begun > sampling.prompt_seconds:
                self._finish(flight, Delta("", (), "length"))

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


def _reason(error: BaseException) -> str:
    """Why a forward pass failed, for those whose requests it drops."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return (
            "the server ran out of memory in the model's forward pass; the request was dropped; send a shorter prompt, "
            "or start the server with fewer --max-slots, a lower --max-model-len or smaller --chunk-tokens"
        )
    return f"the model's forward pass failed ({type(error).__name__}); the request was dropped"
