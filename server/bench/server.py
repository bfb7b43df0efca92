"""A real server for a benchmark or a test: ``unbind serve`` on a free port of loopback, ended by its process id."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from server.settings import PREFIX
from server.worker.process import python, without_settings
from unbind_core.errors import UnbindError

END_SECONDS = 30.0


@dataclass(frozen=True)
class Served:
    """A server that listens at ``url``."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def served(
    settings: Mapping[str, object],
    folder: Path,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    command: str = "serve",
) -> Iterator[Served]:
    """A server with these settings and no others, which keeps its data in ``folder``; its worker ends with it.

    ``command`` starts it: ``serve`` or ``guard``.

    It runs in the folder ``cwd``, in this process's environment with ``environment`` on top, and writes its log to the file
    ``log``, or to this process's standard error. Raises UnbindError where it does not start.
    """
    given = {"port": 0, "data_dir": folder, "log_level": "error", **settings}
    with ExitStack() as files:
        process = subprocess.Popen(
            python("server", command, "--json"),
            cwd=cwd,
            env=without_settings({**os.environ, **(environment or {})})
            | {PREFIX + name.upper(): str(value) for name, value in given.items()},
            stdout=subprocess.PIPE,
            stderr=files.enter_context(log.open("w")) if log else None,
            text=True,
        )
    assert process.stdout is not None
    try:
        announced = ""
        while not announced.endswith("}\n"):
            line = process.stdout.readline()
            if not line:
                raise UnbindError(f"the server did not start: {log.read_text() if log else 'its reason is above'}")
            announced += line
        yield Served(str(json.loads(announced)["url"]), process)
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
