"""The worker's side of a child process: started ahead in a group of its own, given one task, listened to, killed at any time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from server.worker.child import ALIVE
from server.worker.plan import Task

log = logging.getLogger("unbind.worker")


class Child:
    """One child process. ``messages`` holds what it said; None after it has ended. ``signs`` counts its signs of life."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.signs = 0
        self._process = subprocess.Popen(
            [*command, str(os.getpid())],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, name=f"unbind-child-{self._process.pid}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it can still be given a task."""
        return self._process.poll() is None

    def give(self, task: Task) -> None:
        """Let it work. One that is dead already is noticed by its end, as one that dies later is.

        Never waits: a task that tells of many modules is more than a pipe holds, and is read once the child has its imports.
        """
        threading.Thread(target=self._write, args=(json.dumps(asdict(task)) + "\n",), daemon=True).start()

    def kill(self) -> None:
        """End it and whatever it started, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Its exit status once it has ended; negative where a signal ended it."""
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return status

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # dead, or closed while it was written
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while it was read
            for line in self._process.stdout:
                self.signs += 1
                if line == ALIVE:
                    continue
                try:
                    self.messages.put(json.loads(line))
                except json.JSONDecodeError:  # killed in the middle of a line
                    log.warning("a child process said something unreadable")
        self.messages.put(None)
