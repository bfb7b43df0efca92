"""The worker as a process: its start beside the server, its supervision, and what it does when either side dies.

``spawn`` and ``Supervisor`` run in the server; ``main`` runs in the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time

from server.settings import PREFIX, Settings
from server.worker.child import die_with_parent

log = logging.getLogger("unbind.worker")
GRACE_SECONDS = 5.0


class Supervisor:
    """Keeps one worker process running for as long as the server runs."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
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
            self._process = await spawn(self._settings)
            code = await self._process.wait()
            if time.monotonic() - started > 30:
                pause = 0.5
            log.error("the worker ended with code %s; starting another in %.1f s", code, pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 30.0)

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """End the worker: ask, wait, insist."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace)
        except TimeoutError:
            process.kill()
            await process.wait()


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment of a worker with these settings, which its child processes inherit."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    # Threads that spin while they wait for each other lose their time slices to the server, and then everything waits.
    threads = {"OMP_NUM_THREADS": str(settings.worker_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return environment | settings.to_environment() | threads


async def spawn(settings: Settings) -> asyncio.subprocess.Process:
    """Start a worker with these settings that ends when this process does."""
    command = [sys.executable, "-m", "server.worker", str(os.getpid())]
    return await asyncio.create_subprocess_exec(
        *command, env=environment_of(settings), stdin=asyncio.subprocess.DEVNULL
    )


def main(settings: Settings, parent: int | None) -> None:
    """Run a worker in this process until SIGTERM, SIGINT or, with ``parent``, until that process is gone."""
    from server.worker.worker import Worker

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if parent is not None:
        die_with_parent(signal.SIGTERM, parent)
    os.nice(settings.worker_nice)
    Worker(settings, stop).run()
