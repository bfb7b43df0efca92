"""How many threads a stage is given: never more than it may have, never none, and what the cores about it allow."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
import torch

from server.worker import share
from server.worker.share import Share, threads
from unbind_core.progress import Progress


@pytest.mark.parametrize(
    ("cores", "most", "expected"),
    [(0.0, 2, 1), (0.7, 2, 1), (1.3, 2, 1), (1.65, 2, 2), (2.0, 2, 2), (2.0, 1, 1), (7.8, 4, 4), (7.8, 16, 8)],
)
def test_a_thread_for_every_core_that_is_there(cores: float, most: int, expected: int) -> None:
    assert threads(cores, most) == expected


def test_a_stage_beside_busy_processes_gets_one_thread_and_all_of_them_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(share, "SECONDS", 0.3)
    most, told = psutil.cpu_count() or 1, list[Progress]()
    before = torch.get_num_threads()
    busy = [
        subprocess.Popen([sys.executable, "-c", "import time\nt = time.time()\nwhile time.time() < t + 20: pass"])
        for _ in range(2 * most)
    ]
    try:
        watching = Share(most).watching(told.append)
        deadline, found = time.monotonic() + 15, most + 1
        while time.monotonic() < deadline and found > max(1, most // 2 + 1):
            torch.randn(300, 300) @ torch.randn(300, 300)
            watching(Progress("detector", 1, 2))
            found = torch.get_num_threads()
        assert found <= max(1, most // 2 + 1)
        assert set(told) == {Progress("detector", 1, 2)}
    finally:
        for process in busy:
            process.kill()
            process.wait()
        torch.set_num_threads(before)
