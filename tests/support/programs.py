"""How tests start programs that compute: with the cores that fall to one of the processes that share the tests."""

from __future__ import annotations

import os

from tests.support.repository import ROOT

SHARING = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // SHARING)),  # more threads than cores would crawl
    "PYTHONPATH": str(ROOT),
}
