"""How tests start programs that compute: with the cores that fall to one of the processes that share the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.repository import ROOT

SHARING = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // SHARING)),  # more threads than cores would crawl
    "PYTHONPATH": str(ROOT),
}


def unbind(*arguments: str) -> Any:
    """What ``unbind ... --json`` prints on its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "server", *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
