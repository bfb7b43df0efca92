"""The worker's hand in a child process: whatever it gives, the worker's own loop never waits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from server.registry.tables import JobKind
from server.worker.hands import Child
from server.worker.plan import Task
from server.worker.process import STAGES

READS = "import sys, time; time.sleep({}); print('[' + str(len(sys.stdin.readline())) + ']', flush=True)"
BIG = Task("job", JobKind.TAKEDOWN, "m", "f", {}, "", {}, others=[{"name": f"takedown-{i}" * 40} for i in range(1000)])


def test_a_task_of_many_modules_is_given_at_once_and_arrives_whole() -> None:
    child = Child([sys.executable, "-c", READS.format(0.5)], os.environ)
    try:
        began = time.monotonic()
        child.give(BIG)
        assert time.monotonic() - began < 0.3
        (length,) = child.messages.get(timeout=30) or ()
        assert length > 400_000
    finally:
        child.kill()


@pytest.mark.parametrize("dead", [True, False])
def test_a_child_that_dies_with_its_task_half_read_is_noticed_by_its_end(dead: bool) -> None:
    child = Child([sys.executable, "-c", READS.format(60)], os.environ)
    if dead:
        child.kill()
    child.give(BIG)
    child.kill()
    assert child.messages.get(timeout=30) is None and not child.alive


def test_where_memory_runs_out_the_kernel_ends_a_jobs_process_before_its_server() -> None:
    child = Child(STAGES, os.environ)
    try:
        while not child.signs and child.alive:
            time.sleep(0.01)
        said = [Path(f"/proc/{which}/oom_score_adj").read_text() for which in (child._process.pid, "self")]
        assert int(said[0]) == 1000 > int(said[1])
    finally:
        child.kill()
