"""Starts the process that a program runs in (:mod:`unbind_lab.tasks.sandboxed`), asks it, and reads no more than it may say."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]  # the folder of the package; gone from the path before a program runs
START = "import sys; sys.path.append(sys.argv[1]); from unbind_lab.tasks.sandboxed import main; sys.path.pop(); main()"
# Sets of texts have one order in every child, so that a solution gives the same twice. A thread a core takes memory for nothing.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def ask(asked: Mapping[str, Any], *, seconds: float, most: int) -> Any:
    """The JSON value that the child answers; None where it fails, takes more than ``seconds`` by the clock, or says more than
    ``most`` bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", "-c", START, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        assert child.stdin is not None and child.stdout is not None
        writer = threading.Thread(target=_write, args=(child.stdin, json.dumps(asked).encode()), daemon=True)
        try:
            writer.start()
            told = _read(child.stdout, seconds, most)
        finally:
            os.killpg(
                child.pid, signal.SIGKILL
            )  # and what it started; it has not been waited for, so the group is there
            child.wait()
            writer.join()
            child.stdout.close()
    if told is None:
        return None
    try:
        return json.loads(told)
    except (ValueError, RecursionError):
        return None


def _write(stream: IO[bytes], data: bytes) -> None:
    try:
        with stream:
            stream.write(data)
    except BrokenPipeError:
        pass  # it has failed already


def _read(stream: IO[bytes], seconds: float, most: int) -> bytes | None:
    until, found = time.monotonic() + seconds, bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while (left := until - time.monotonic()) > 0:
            if selector.select(left):
                some = os.read(stream.fileno(), 1 << 16)
                if not some:
                    return bytes(found)
                found += some
                if len(found) > most:
                    return None
    return None
