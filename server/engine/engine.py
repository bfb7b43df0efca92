"""The engine: one thread that admits, runs, samples and publishes, step after step.

``generate(request)`` -> async stream of ``Delta``; ``sync_modules`` changes what can be named; ``stats`` for metrics.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from server.engine.modules import Counts, ModuleTable
from server.engine.request import Delta, FinishReason, Flight, GenerationRequest, Sampling, Status
from server.engine.runner import Runner
from server.engine.sampler import sample, uniform_source
from server.engine.scheduler import Plan, Scheduler
from server.engine.text import TextStream
from unbind_core.bank import ModuleBank
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.engine")
T = TypeVar("T")


class EngineStopped(Exception):
    """The engine shuts down or is down; nothing more is admitted."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for the metrics."""

    running: int
    waiting: int
    slots: int
    steps: int
    failures: int


class Engine:
    """Continuous batching of one model. Built and closed by the application's lifespan; ``start`` before use."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_slots: int = 8,
        max_length: int = 2048,
        queue_limit: int = 64,
        chunk_tokens: int = 512,
    ) -> None:
        self.tokenizer = tokenizer
        bank = ModuleBank(next(model.parameters()).device)
        self.modules = ModuleTable(bank)
        self.scheduler = Scheduler(max_slots, max_length, queue_limit, chunk_tokens)
        self.runner = Runner(model, bank, max_slots, max_length)
        self.end_ids = _end_ids(model, tokenizer)
        self._wake = threading.Condition()
        self._arrived: deque[Flight] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._steps = self._failures = 0
        self._thread = threading.Thread(target=self._run, name="unbind-engine", daemon=True)

    def start(self) -> None:
        """Check the model on the slot cache, then begin to serve. Raises UnsupportedArchitecture."""
        ids = tuple(range(5, 17)) if len(self.tokenizer) > 17 else (0, 1, 2)
        probe = Flight(
            GenerationRequest(ids), TextStream(self.tokenizer, ()), lambda _: None, uniform_source(0), slot=0
        )
        self.runner.self_test(probe)
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step; requests still in flight end with an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self.runner.close()

    # What other threads call.

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Stream one answer; leaving the iteration early frees the slot within a step.

        Raises QueueFull, PromptTooLong, EngineStopped before the first delta.
        """
        flight, deltas = self.submit(request)
        try:
            while True:
                delta = await deltas.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.cancel(flight)

    def submit(self, request: GenerationRequest) -> tuple[Flight, asyncio.Queue[Delta]]:
        """Queue a request at once and give back where its deltas arrive. Raises as ``generate``."""
        self.scheduler.check_fits(len(request.prompt), request.sampling.max_tokens)
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta] = asyncio.Queue()

        def deliver(delta: Delta) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        flight = Flight(
            request,
            TextStream(self.tokenizer, request.sampling.stop),
            deliver,
            uniform_source(request.sampling.seed),
        )
        with self._wake:
            if self._stopping:
                raise EngineStopped("the server is shutting down")
            self.scheduler.check_room(len(self._arrived))
            self._arrived.append(flight)
            self._wake.notify()
        return flight, deltas

    def cancel(self, flight: Flight) -> None:
        """End a request that nobody listens to any more; nothing happens if it is finished."""
        with self._wake:
            flight.cancelled = True
            self._wake.notify()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def errand() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                future.set_exception(error)

        with self._wake:
            if self._stopping:
                raise EngineStopped("the server is shutting down")
            self._errands.append(errand)
            self._wake.notify()
        return future

    def sync_modules(self, modules: Iterable[tuple[UnbindModule, str]]) -> Future[None]:
        """Make exactly these (module, digest) nameable; running requests keep the versions they were admitted with."""
        wanted = list(modules)
        return self.call(lambda: self.modules.sync(wanted))

    def gate_counts(self) -> Future[Counts]:
        """Module -> phase -> (positions evaluated, gates open), read between two steps."""
        return self.call(self.modules.counts)

    def stats(self) -> EngineStats:
        """How busy the engine is."""
        waiting = len(self._arrived) + len(self.scheduler.waiting)
        slots = self.scheduler.slots
        return EngineStats(len(slots) - slots.count(None), waiting, len(slots), self._steps, self._failures)

    # The engine's thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._arrived or self._errands) and self.scheduler.idle:
                    self._wake.wait()
                if self._stopping:
                    break
                arrived, errands = list(self._arrived), list(self._errands)
                self._arrived.clear()
                self._errands.clear()
                self.scheduler.waiting.extend(arrived)
            for errand in errands:
                errand()
            try:
                self.step()
            except Exception:  # the thread must outlive any error: without it every client would hang
                log.exception("the engine met an error outside a forward pass")
                self._end_all("the engine met an error; the request was dropped")
        self.scheduler.waiting.extend(self._arrived)
        self._end_all("the server is shutting down")
        for errand in self._errands:
            errand()

    def step(self) -> None:
        """Admit, run, sample, publish."""
        self._drop_cancelled()
        for plan in self.scheduler.schedule().passes():
            self._advance(plan)
        self.modules.collect()
        self._steps += 1

    def _advance(self, plan: Plan) -> None:
        """One forward pass and what follows from it; a pass that raises fails its own requests and no others."""
        flights = [chunk.flight for chunk in plan.prefill] or list(plan.decode)
        try:
            logits = self.runner.prefill(plan.prefill) if plan.prefill else self.runner.decode(plan.decode)
            self.scheduler.computed(plan)
            # an incomplete prompt draws no number, so that a seed means the same however it was cut into chunks
            rows = [i for i, flight in enumerate(flights) if flight.status is Status.RUNNING]
            ready = [flights[i] for i in rows]
            logits = logits if len(rows) == len(flights) else logits[rows]
            tokens, finite = (
                sample(logits, [f.request.sampling for f in ready], [f.draw for f in ready]) if rows else ([], [])
            )
        except Exception as error:
            log.exception("a step of %d requests failed", len(flights))
            self._fail(flights, f"the model's forward pass failed ({type(error).__name__}); the request was dropped")
            return
        for flight, token, sound in zip(ready, tokens, finite, strict=True):
            if sound:
                self._publish(flight, token)
            else:
                self._fail([flight], "the model produced logits that are not finite; the request was dropped")

    def _publish(self, flight: Flight, token: int) -> None:
        """Append one token to its request, hand over what text is certain, and end the request where it ends."""
        sampling = flight.request.sampling
        flight.output.append(token)
        if token in self.end_ids and not sampling.ignore_eos:
            self._finish(flight, Delta(flight.text.flush(), (), "stop"))
            return
        text, stopped = flight.text.push(token)
        if stopped:
            self._finish(flight, Delta(text, (token,), "stop"))
        elif len(flight.output) >= sampling.max_tokens:
            self._finish(flight, Delta(text + flight.text.flush(), (token,), "length"))
        else:
            flight.deliver(Delta(text, (token,)))

    def _finish(self, flight: Flight, delta: Delta) -> None:
        self.scheduler.finish(flight)
        flight.deliver(delta)

    def _drop_cancelled(self) -> None:
        for flight in [*self.scheduler.admitted, *self.scheduler.waiting]:
            if flight.cancelled:
                self._finish(flight, Delta("", (), "cancelled"))

    def _end_all(self, reason: str) -> None:
        for flight in [*self.scheduler.admitted, *self.scheduler.waiting]:
            self._finish(flight, Delta("", (), "error", reason))

    def _fail(self, flights: Sequence[Flight], reason: str) -> None:
        for flight in flights:
            if flight.slot >= 0:
                self.runner.cache.clear(flight.slot)
            self._failures += 1
            self._finish(flight, Delta("", (), "error", reason))


def _end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer: the generation settings', as plain ``generate`` takes them, and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


__all__ = ["Engine", "EngineStats", "EngineStopped", "FinishReason", "Sampling"]
