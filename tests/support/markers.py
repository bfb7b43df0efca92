"""Places of publishing at which a test has the process stop itself, by SIGSTOP, so that it is killed exactly there.

The environment variable ``STOP_AT`` names the place; only the processes of ``fast_stages`` know of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

STOP_AT = os.environ.get("STOP_AT", "")
# of the child, in the order in which it comes there
CHILD = ("child: before the module is written", "child: module written", "child: checkpoint written")
WORKER = (
    "worker: before the put",
    "worker: file written, not in place",
    "worker: after the put",
    "worker: within the transaction",
    "worker: committed",
    "worker: before tidying",
)


def here(place: str) -> None:
    """Stop, where this is the place."""
    if place and place == STOP_AT:
        os.kill(os.getpid(), signal.SIGSTOP)


def mark_worker() -> None:
    """Put the marks around what a worker publishes with."""
    from server.registry import jobs, objects, trail
    from server.worker import scratch

    def marked(module: Any, name: str, before: str = "", after: str = "") -> None:
        whole: Callable[..., Any] = getattr(module, name)

        def run(*given: Any, **named: Any) -> Any:
            here(before)
            result = whole(*given, **named)
            here(after)
            return result

        setattr(module, name, run)

    write_whole = objects.write_whole

    def write(path: Any, fill: Callable[[Any], object]) -> None:
        def filled(temporary: Any) -> None:
            fill(temporary)
            here(WORKER[1])

        write_whole(path, filled)

    objects.write_whole = write
    marked(objects.ObjectStore, "put", WORKER[0], WORKER[2])
    marked(jobs, "end_job", after=WORKER[3])
    marked(scratch.Scratch, "tidy", before=WORKER[5])
    marked(trail.Trail, "follow", before=WORKER[4])  # committed, and the trail's head not yet moved on
