"""What a worker loads when it starts: it supervises, and the child that computes loads torch."""

from __future__ import annotations

import subprocess
import sys


def test_a_worker_starts_without_torch() -> None:
    code = "import sys, server.worker.worker; print(*({'torch', 'transformers'} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.split() == []
