"""A real server for a benchmark: ``unbind serve`` on a free port of loopback, ended by its process id."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from server.settings import PREFIX
from server.worker.process import python
from unbind_core.errors import UnbindError

END_SECONDS = 30.0


@contextmanager
def served(settings: Mapping[str, object], folder: Path) -> Iterator[str]:
    """The address of a server with these settings and no others, which keeps its data in ``folder``. Raises UnbindError."""
    given = {"port": 0, "data_dir": folder, "log_level": "error", **settings}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    process = subprocess.Popen(
        python("server", "serve", "--json"),
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {PREFIX + name.upper(): str(value) for name, value in given.items()},
    )
    assert process.stdout is not None
    try:
        announced = ""
        while not announced.endswith("}\n"):
            line = process.stdout.readline()
            if not line:
                raise UnbindError("the server to be measured did not start; its reason is above")
            announced += line
        yield str(json.loads(announced)["url"])
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
