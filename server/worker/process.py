"""The worker as a process: its start beside the server, its supervision, and what it does when either side dies.

``Supervisor`` runs in the server; ``main`` runs in the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.exporting.otel import open_tracing
from server.settings import PREFIX, Settings
from server.sources import written_out
from server.telemetry.work import WorkPort
from server.worker.child import die_with_parent
from unbind_core.errors import UnbindError

log = logging.getLogger("unbind.worker")
GRACE_SECONDS = 5.0
BEAT = b"."
START_SECONDS = 300.0  # until a worker's first sign of life: its imports, and the database that it may have to upgrade
LOOKS = 5  # silences in a row before a worker counts as hung: one alone may be this process's own


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours in a Python of its own.

    ``-P``: what lies in the current directory is somebody's project, and its ``server/`` or ``json.py`` is not ours.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


WORKER = python("server.worker")
STAGES = python("server.worker.child")


class Supervisor:
    """Keeps one worker process running for as long as the server runs; ends one that gives no sign of life."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] = WORKER,
        told: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """``told`` hears what the worker has done, as it says it (``Heart.tell``)."""
        self._settings, self._command = settings, command
        self._told = told or (lambda _: None)
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process else None

    async def start(self) -> None:
        """Start the worker and watch over it."""
        self._task = asyncio.create_task(self._keep_running(), name="unbind-worker-supervisor")

    async def _keep_running(self) -> None:
        pause = 0.5
        while True:
            started = time.monotonic()
            try:
                ended = f"ended with code {await self._run()}"
            except Exception:  # it must go on: as when no process can be started for a moment
                log.exception("the worker could not be started or watched over")
                ended = "is given up"
                await self._end(0.0)
            if time.monotonic() - started > 30:
                pause = 0.5
            self.restarts += 1
            log.error("the worker %s; starting another in %.1f s", ended, pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 30.0)

    async def _run(self) -> int:
        # It dies with this process, and what it writes to standard output are signs of life.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            str(os.getpid()),
            env=environment_of(self._settings),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._watch(self._process)
        return await self._process.wait()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Until its standard output ends, which it does with the process; kills a process that is silent for too long.

        A stopped or stuck worker would keep its device from every other worker of this host.
        """
        assert process.stdout is not None
        limit, silences, left = START_SECONDS, 0, b""
        while silences < LOOKS:
            try:
                said = await asyncio.wait_for(process.stdout.read(4096), limit / LOOKS)
            except TimeoutError:
                silences += 1
                continue
            if not said:
                return
            limit, silences = self._settings.hang_seconds, 0
            *lines, left = (left + said).split(b"\n")
            left = left.lstrip(BEAT)
            for line in lines:
                if news := line.lstrip(BEAT):
                    self._told(json.loads(news))
        log.error("the worker gave no sign of life for %.0f s (hang_seconds); it is killed", limit)
        process.kill()

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """End the worker: ask, wait, insist."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._end(grace)

    async def _end(self, grace: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace)
        except TimeoutError:
            process.kill()
            await process.wait()


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child process that is given settings of its own inherits of an environment: all but ours."""
    return {key: value for key, value in environment.items() if not key.startswith(PREFIX)}


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment of a worker with these settings."""
    # Threads that spin while they wait for each other lose their time slices to the server, and then everything waits.
    threads = {"OMP_NUM_THREADS": str(settings.worker_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    # The one secret that a worker needs itself; the processes of its stages get files that are opened already.
    secret = {f"{PREFIX}PRIVATE_KEY": settings.private_key} if settings.private_key else {}
    return without_settings(os.environ) | written_out(settings) | threads | secret


class Heart:
    """Signs of life and news to the supervisor that holds the other end of standard output; what is printed goes to the log."""

    def __init__(self) -> None:
        self._unsent = b""
        self._pipe = os.dup(1)
        os.set_blocking(self._pipe, False)
        os.dup2(2, 1)

    def beat(self) -> None:
        """Give one. Where nobody reads, nothing waits."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self._unsent = self._unsent[os.write(self._pipe, self._unsent or BEAT) :]

    def tell(self, news: Mapping[str, Any]) -> None:
        """Say what was done, now or with a later beat."""
        self._unsent += json.dumps(dict(news)).encode() + b"\n"
        self.beat()


def main(settings: Settings, parent: int | None, stages: Sequence[str] = STAGES) -> None:
    """Run a worker in this process until SIGTERM, SIGINT, SIGHUP or, with ``parent``, until that process is gone.

    ``stages`` is the command of its child processes. Ends with status 1 where the registry cannot be opened.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda *_: stop.set())
    if parent is not None:
        die_with_parent(signal.SIGTERM, parent)
    os.nice(settings.worker_nice)
    from server.worker.worker import Worker  # takes a while, in which Ctrl-C is to be no traceback

    try:
        beat, told, port = None, None, None
        if parent is not None:
            heart = Heart()
            beat, told = heart.beat, heart.tell
        elif settings.worker_metrics_port is not None:
            port = WorkPort(settings.metrics_host, settings.worker_metrics_port)
            told = port.work.take
            log.info("metrics: http://%s:%d/metrics", settings.metrics_host, port.number)
        worker = Worker(settings, stop, stages, beat, told)
        tracing = open_tracing(settings)
    except UnbindError as error:  # one line: while a database is away every start ends so
        log.error("the worker cannot start: %s", error)
        sys.exit(1)
    if tracing is not None:
        from server.exporting.jobs import TracedJobs

        worker.registry.jobs = TracedJobs(worker.registry.transactions, tracing)
    if settings.retain == Settings.model_fields["retain"].default and not settings.is_demo:
        log.warning(
            "retain is not set: takedowns of this model are fitted beside the demo's rows, Python of a few packages, and what they "
            "cost other code is measured on these; set it to code like that which clients ask for"
        )
    worker.run()
    if port is not None:
        port.close()
    if tracing is not None:
        tracing.close()
