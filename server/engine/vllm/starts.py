"""Starts of vLLM's processes: given up where the server is to end meanwhile, tried again where they fail.

vLLM holds its event loop while they load, which may take minutes, and they heed no signal until they have: so they are killed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

import psutil

from server.engine.refusals import EngineStopped

log = logging.getLogger("unbind.engine")
T = TypeVar("T")
BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)  # before the model's processes are started again
LOOK_SECONDS = 0.5  # between two looks at whether a start is given up


class Starts:
    """Those of one engine. ``given_up``: one that runs, and each that follows, is to fail soon; set from any thread."""

    def __init__(self) -> None:
        self.given_up = False
        self._others = set(multiprocessing.active_children())  # of engines that were here before

    def result(self, of: Future[T], seconds: float = float("inf")) -> T:
        """What comes of it within so many seconds. Raises what it raises, TimeoutError, and EngineStopped for any error of what
        was given up.
        """
        while seconds > 0 and not wait([of], LOOK_SECONDS).done:
            seconds -= LOOK_SECONDS
            if self.given_up:
                self._kill()
        if self.given_up and of.done() and of.exception() is not None:
            raise EngineStopped("the start was given up")
        return of.result(0)

    def _kill(self) -> None:
        """vLLM's processes and theirs, which hear of the end of the first only once they have loaded."""
        for core in set(multiprocessing.active_children()) - self._others:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(core.pid)
                for one in [process, *process.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()


async def again(start: Callable[[], Awaitable[None]]) -> None:
    """Start the model's processes, with pauses, until they run."""
    for attempt in itertools.count():
        await asyncio.sleep(BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS) - 1)])
        try:
            await start()
        except Exception:
            log.exception("the model's processes do not start")
        else:
            log.info("the model's processes run again")
            return


def ended(process: psutil.Process) -> bool:
    """Whether it does nothing any more."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
