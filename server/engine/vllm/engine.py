"""vLLM as the engine: its ``AsyncLLM`` on a thread and event loop of its own here, the model in processes of its own.

A request is a task: it asks vLLM for tokens, and does with each what the embedded engine does with its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase
from vllm.v1.engine.exceptions import EngineDeadError

from server.engine.answering import dropped, hand_over_end
from server.engine.engine import Engine, EngineStats, check_fits, check_queue
from server.engine.flights import flight_of
from server.engine.grammars import Grammars
from server.engine.modules import Gates, ModuleTable
from server.engine.refusals import EngineRestarts, EngineStopped
from server.engine.request import Delta, Flight, GenerationRequest
from server.engine.vllm.arguments import Arguments
from server.engine.vllm.legs import Leg, digest_of, prompt_read
from server.engine.vllm.model import Model
from server.engine.vllm.remote import PROBE_COLUMNS, RemoteBank
from server.engine.vllm.starts import Starts, again
from unbind_core.errors import UnbindError
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.engine")
T = TypeVar("T")
TRIAL_SECONDS = 120.0
CALL_SECONDS = 600.0
GONE = "the model's processes ended; the request was dropped; try again"


class VllmEngine(Engine):
    """Requests to vLLM and back. ``modules`` is as in every engine; its bank is a copy of what the model's processes hold."""

    least_tokens = 1  # vLLM chooses one always

    def __init__(
        self,
        arguments: Arguments,
        tokenizer: PreTrainedTokenizerBase,
        identity: ModelIdentity,
        numerics: Mapping[str, Any],
        width: int,
        queue_limit: int,
    ) -> None:
        self.tokenizer = tokenizer
        self._arguments, self._identity, self._queue_limit = arguments, identity, queue_limit
        self.grammars = Grammars(tokenizer, width, frozenset(arguments.ends))
        self._bank = RemoteBank()
        self.modules = ModuleTable(self._bank, numerics, self._reserve)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="unbind-vllm", daemon=True)
        self._live: set[Flight] = set()  # from submission to the last delta, under ``_ended``
        self._tasks: dict[Flight, asyncio.Task[None]] = {}
        self._used: Counter[str] = Counter()  # flights by the digest of their set
        self._legs, self._starts = itertools.count(), Starts()
        self._model: Model | None = None
        self._up = self._draining = self._stopping = False
        self._ended = threading.Condition()
        self._failures = self._cancelled = 0
        self._background: list[asyncio.Task[None]] = []

    # What other threads call.

    def start(self) -> None:
        """Start the model's processes, and see the edits work in each. Raises UnbindError."""
        self._thread.start()
        self._starts.result(self._begin(self._open()))  # vLLM itself bounds how long its processes may take
        self._loop.call_soon_threadsafe(lambda: self._background.append(self._loop.create_task(self._watch())))

    def give_up(self) -> None:
        """See :meth:`Engine.give_up`."""
        self._starts.given_up = True

    def drain(self, timeout: float) -> bool:
        """See :meth:`Engine.drain`."""
        with self._ended:
            self._draining = True
            return self._ended.wait_for(lambda: not self._live, timeout)

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        self._stopping = True
        self.grammars.close()
        if self._thread.is_alive() and not self._loop.is_closed():
            self._starts.given_up |= not self._up  # of processes that had ended
            with suppress(Exception):
                self._starts.result(self._begin(self._close()), 60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)

    @property
    def draining(self) -> bool:
        """See :meth:`Engine.draining`."""
        return self._draining or self._stopping

    @property
    def healthy(self) -> bool:
        """See :meth:`Engine.healthy`: false while the model's processes are started again."""
        return self._up

    @property
    def max_length(self) -> int:
        """See :meth:`Engine.max_length`."""
        return self._arguments.max_length

    @property
    def slots(self) -> int:
        """See :meth:`Engine.slots`."""
        return self._arguments.slots

    def submit(self, request: GenerationRequest) -> tuple[Flight, asyncio.Queue[Delta]]:
        """See :meth:`Engine.submit`."""
        check_fits(len(request.prompt), request.sampling.max_tokens, self.max_length, self.least_tokens)
        self._check_admits(request.owner)
        loop, deltas = asyncio.get_running_loop(), asyncio.Queue[Delta]()

        def deliver(delta: Delta) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        flight = flight_of(request, self.tokenizer, frozenset(self._arguments.ends), deliver)
        with self._ended:  # who drains sees it, or it is refused
            self._check_admits(request.owner)
            self._live.add(flight)
        self._loop.call_soon_threadsafe(self._admit, flight)
        return flight, deltas

    def _check_admits(self, owner: str) -> None:
        if self.draining:
            raise EngineStopped("the server is shutting down and takes no new requests; try another or come back")
        if not self._up:
            raise EngineRestarts("the model's processes are being started again; try again shortly")
        own = sum(flight.request.owner == owner for flight in list(self._live))  # which land meanwhile
        check_queue(len(self._live) - self.slots, own - self.slots, self._queue_limit, owner)

    def cancel(self, flight: Flight) -> None:
        """See :meth:`Engine.cancel`."""
        flight.cancelled = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel, flight)

    def sync_modules(self, modules: Iterable[tuple[UnbindModule, str]]) -> Future[None]:
        """See :meth:`Engine.sync_modules`."""
        wanted = list(modules)
        return self._post(lambda: asyncio.to_thread(self.modules.sync, wanted))

    def gates(self) -> Future[Gates]:
        """See :meth:`Engine.gates`."""
        return self._post(self._gates)

    def stats(self) -> EngineStats:
        """See :meth:`Engine.stats`."""
        model, active = self._model, len(self._live)
        running = min(active, self.slots)
        seen = (model.preemptions, self._cancelled, model.kv_usage) if model else (0, self._cancelled)
        return EngineStats(running, active - running, self.slots, model.steps if model else 0, self._failures, *seen)

    # The engine's own loop.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _await(self, work: Coroutine[Any, Any, T], seconds: float | None = CALL_SECONDS) -> T:
        return self._begin(work).result(seconds)

    def _post(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        if self._stopping or not self._thread.is_alive():
            raise EngineStopped("the server is shutting down")
        return self._begin(work())

    async def _open(self) -> None:
        """The model's processes, with all modules that there are, tried."""
        model = self._model = await Model.started(self._arguments, self._identity)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await model.hold(self._bank.contents())
            await model.tried(CALL_SECONDS)
        except BaseException:
            await model.close()
            raise
        self._up = True

    async def _close(self) -> None:
        for task in [*self._background, *self._tasks.values()]:
            task.cancel()
        for task in list(self._tasks.values()):
            with suppress(asyncio.CancelledError):
                await task
        if self._model is not None:
            await self._model.close()

    async def _watch(self) -> None:
        """Try the edits now and then, and start the model's processes again where they have died or fail the trial."""
        while True:
            model = self._model
            assert model is not None
            await model.until_trial(lambda: len(self._tasks))
            try:
                if not model.dead:
                    await model.tried(TRIAL_SECONDS)
                    continue
            except Exception as error:  # noqa: BLE001 - edits that cannot be tried are not known to be at work
                log.error("the edits are not at work in the model's processes: %s", error)
            self._up = False
            await self._again()

    async def _again(self) -> None:
        log.error("the model's processes ended and are started again; requests that ran or waited end with an error")
        for task in self._tasks.values():  # what hangs would not end by itself
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        if self._model is not None:
            self._bank.keep(self._model.counts, self._model.looks)
            await self._model.close()
        await again(self._open)

    def _reserve(self) -> None:
        """Bring the bank's modules to the processes, from the thread that changes the table. Raises UnbindError."""
        stages = len(self._model.reports.stages) if self._model is not None else 1
        self._bank.check(self._arguments.columns, PROBE_COLUMNS * stages, self._arguments.layers)
        if self._model is not None and not self._model.dead:
            try:
                self._await(self._model.hold(self._bank.contents()))
            except EngineDeadError as error:
                raise UnbindError("the model's processes are being started again; they get the modules then") from error

    async def _gates(self) -> Gates:
        if (model := self._model) is not None and self._up:
            with suppress(EngineDeadError):
                await model.count()
                self._bank.seen(model.counts, model.looks)
        return self.modules.gates()

    def _admit(self, flight: Flight) -> None:
        task = self._tasks[flight] = self._loop.create_task(self._fly(flight))
        task.add_done_callback(partial(self._landed, flight))
        if flight.cancelled or self._stopping or not self._up:  # whoever ends all requests may have been here before
            task.cancel()

    def _cancel(self, flight: Flight) -> None:
        if (task := self._tasks.get(flight)) is not None:
            task.cancel()

    async def _fly(self, flight: Flight) -> None:
        digest, model = digest_of(flight), self._model
        assert model is not None
        self._used[digest] += 1
        try:
            await prompt_read(flight)
            if digest:
                await model.know(digest, flight.request.modules.strengths, self._used)
            while not await Leg(flight, f"r{next(self._legs)}", digest, model).run():
                pass
        except EngineDeadError:
            model.died.set()
            raise
        finally:
            self._used[digest] -= 1
            if not self._used[digest]:
                del self._used[digest]

    def _landed(self, flight: Flight, task: asyncio.Task[None]) -> None:
        """The request's task has ended, or was cancelled before it began, when nothing of its own runs any more."""
        del self._tasks[flight]
        try:
            if task.cancelled():
                gone = "the server is shutting down" if self._stopping else "" if self._up else GONE
                self._cancelled += not gone
                hand_over_end(flight, Delta("", (), "error", gone) if gone else Delta("", (), "cancelled"))
            elif (error := task.exception()) is not None:  # a panic in a library's Rust as well, which is no Exception
                self._failures += 1
                died = isinstance(error, EngineDeadError)
                if not died:
                    log.error("a request failed", exc_info=error)
                hand_over_end(flight, Delta("", (), "error", GONE if died else dropped(error)))
        finally:
            with self._ended:
                self._live.discard(flight)
                self._ended.notify_all()
