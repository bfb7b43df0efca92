"""The engine: one thread that admits, runs, samples and publishes, step after step.

``generate(request)`` -> async stream of ``Delta``; ``sync_modules`` changes what can be named; ``stats`` for metrics.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedTokenizerBase

from server.engine.answering import end_ids
from server.engine.embedded.runner import Runner
from server.engine.embedded.scheduler import LEAST_PASS, Scheduler
from server.engine.embedded.step import Stepper
from server.engine.engine import Engine, EngineStats
from server.engine.flights import flight_of, uniform_source
from server.engine.grammars import Grammars
from server.engine.letters import Letters
from server.engine.modules import Gates, ModuleTable
from server.engine.refusals import EngineStopped, QueueFull
from server.engine.request import (
    Delta,
    Flight,
    GenerationRequest,
)
from server.engine.text import TextStream
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import numerics
from unbind_core.cpu.lanes import MOST_LANES, Lanes
from unbind_core.cpu.speedups import EVERY, Speedups
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.engine")
T = TypeVar("T")
PARTS_A_SECOND = 500  # of all streams together: each takes Python time, which the forward passes wait for


class EmbeddedEngine(Engine):
    """Continuous batching of one model."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_slots: int = 8,
        max_length: int = 2048,
        queue_limit: int = 64,
        chunk_tokens: int = 512,
        least_pass: int = LEAST_PASS,
        speedups: Speedups = EVERY,
        looks: bool = True,
    ) -> None:
        """``least_pass``: prompt tokens; passes of fewer are not set side by side. ``looks``: scores of gates are counted."""
        self.tokenizer = tokenizer
        weight = next(model.parameters())
        bank = ModuleBank(weight.device, requests=max_slots if looks else 0, dtype=weight.dtype)
        self.runner = Runner(model, bank, max_slots, max_length, speedups)
        self.modules = ModuleTable(bank, numerics(model), self.runner.reserve)
        self.lanes = Lanes(self.runner.device, MOST_LANES if speedups.lanes else 1)
        self.scheduler = Scheduler(max_slots, max_length, queue_limit, chunk_tokens, self.lanes.count)
        self.stepper = Stepper(self.scheduler, self.runner, self.lanes, self.modules, least_pass)
        self._ends = end_ids(model, tokenizer)
        self.grammars = Grammars(tokenizer, self.runner.vocabulary, self._ends)
        self._wake, self._closing = threading.Condition(), threading.Lock()
        self._arrived: deque[Flight] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._outbox: dict[asyncio.AbstractEventLoop, dict[asyncio.Queue[Delta], list[Delta]]] = {}
        self._letters: WeakKeyDictionary[asyncio.AbstractEventLoop, Letters] = WeakKeyDictionary()
        self._posted, self._urgent = 0.0, False
        self._stopping = self._draining = False
        self._thread = threading.Thread(target=self._run, name="unbind-engine", daemon=True)

    def start(self) -> None:
        """Check the model on the slot cache, then begin to serve. Raises UnsupportedArchitecture."""
        ids = tuple(range(5, 17)) if len(self.tokenizer) > 17 else (0, 1, 2)
        ids = ids[: self.runner.max_length - 1]
        nothing, draw = TextStream(self.tokenizer, ()), uniform_source(0)
        slots = range(min(2, len(self.scheduler.slots)))
        self.runner.self_test(
            *(Flight(GenerationRequest(ids), nothing, lambda _: None, draw, slot=slot) for slot in slots)
        )
        self._thread.start()

    def drain(self, timeout: float) -> bool:
        """Admit nothing more and wait until all that was admitted has ended; false where ``timeout`` seconds pass."""
        with self._wake:
            self._draining = True
            self._wake.wait_for(lambda: self._idle or self._stopping or not self._thread.is_alive(), timeout)
            return self._idle

    def close(self) -> None:
        """Stop after the current step; requests still in flight end with an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        with self._closing:
            if self._thread.is_alive():
                self._thread.join()
            self.lanes.close()
            self.runner.close()
            self.grammars.close()

    # What other threads call.

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the server is about to end."""
        return self._draining or self._stopping

    @property
    def healthy(self) -> bool:
        """See :meth:`Engine.healthy`: false once the thread has ended."""
        return self._thread.ident is None or self._thread.is_alive()

    @property
    def slots(self) -> int:
        """Requests that can run at the same time."""
        return len(self.scheduler.slots)

    @property
    def max_length(self) -> int:
        """Prompt and answer tokens that one request can have."""
        return self.scheduler.max_length

    def submit(self, request: GenerationRequest) -> tuple[Flight, asyncio.Queue[Delta]]:
        """Queue a request at once and give back where its deltas arrive. Raises as ``generate``."""
        self.scheduler.check_fits(len(request.prompt), request.sampling.max_tokens)
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta] = asyncio.Queue()

        begun = False

        def deliver(delta: Delta) -> None:
            nonlocal begun
            letters = self._outbox.setdefault(loop, {}).setdefault(deltas, [])
            if letters and delta.finish_reason is None:
                letters[-1] = letters[-1].then(delta)
            else:  # the end stands alone, so that it tells what ended the answer
                letters.append(delta)
            self._urgent |= not begun or delta.finish_reason is not None
            begun = True

        flight = flight_of(request, self.tokenizer, self._ends, deliver)
        with self._wake:
            if self._stopping or self._draining:
                raise EngineStopped("the server is shutting down and takes no new requests; try another or come back")
            try:
                self.scheduler.check_room(self._arrived, request.owner)
            except QueueFull as full:
                waiting = len(self._arrived) + len(self.scheduler.waiting)
                full.retry_after = self.stepper.pace.seconds(waiting, time.monotonic())
                raise
            self._arrived.append(flight)
        loop.call_soon(self._notify)  # not at once: what comes in one turn of the loop then begins in one step
        return flight, deltas

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def cancel(self, flight: Flight) -> None:
        """End a request that nobody listens to any more; nothing happens if it is finished."""
        with self._wake:
            flight.cancelled = True
            self._wake.notify()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def errand() -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                future.set_exception(error)
            except BaseException as error:  # noqa: BLE001 - a panic in a library's Rust, which hardly anybody would catch
                future.set_exception(RuntimeError(repr(error)))

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

    def gates(self) -> Future[Gates]:
        """See :meth:`Engine.gates`; read between two steps."""
        return self.call(self.modules.gates)

    def stats(self) -> EngineStats:
        """How busy the engine is."""
        waiting = len(self._arrived) + len(self.scheduler.waiting)
        slots, stepper = self.scheduler.slots, self.stepper
        running = len(slots) - slots.count(None)
        return EngineStats(
            running,
            waiting,
            len(slots),
            stepper.steps,
            stepper.failures,
            cancelled=stepper.cancelled,
            kv_usage=running / len(slots),
        )

    # The engine's thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            log.critical("the engine ended; nothing is answered until the server is started again", exc_info=True)
        with self._wake:
            ended = "the server is shutting down" if self._stopping else "the engine ended; the request was dropped"
            self._stopping = True  # nobody is let in from here on
            self.scheduler.waiting.extend(self._arrived)
            self._arrived.clear()
            self._wake.notify_all()
        self.stepper.end_all(ended)
        self._post()
        for errand in self._errands:
            errand()

    def _serve(self) -> None:
        while True:
            with self._wake:
                if self._idle:
                    self._wake.notify_all()  # whoever drains
                while self._idle and not (self._stopping or self._errands):
                    self._wake.wait()
                if self._stopping:
                    return
                arrived, errands = list(self._arrived), list(self._errands)
                self._arrived.clear()
                self._errands.clear()
                self.scheduler.waiting.extend(arrived)
            for errand in errands:
                errand()
            try:
                self.stepper.step(self._post)
            except BaseException:  # else the thread would end, by a panic in Rust too, and every client hang
                log.exception("the engine met an error outside a forward pass")
                self.stepper.end_all("the engine met an error; the request was dropped")
            self._post(soon=True)

    @property
    def _idle(self) -> bool:
        return not self._arrived and self.scheduler.idle

    def _post(self, soon: bool = False) -> None:
        """Hand over what passes have made, all of it at once to each event loop: waking one for each token is slow.

        ``soon``: another short pass follows, so that what neither begins nor ends an answer can wait a little.
        """
        now = time.perf_counter()
        streams = sum(map(len, self._outbox.values()))
        if soon and not self._urgent and now - self._posted < streams / PARTS_A_SECOND:
            return
        self._posted, self._urgent = now, False
        outbox, self._outbox = self._outbox, {}
        for loop, letters in outbox.items():
            with suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                loop.call_soon_threadsafe(self._letters.setdefault(loop, Letters()).take, letters)
