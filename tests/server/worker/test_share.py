"""How many threads a stage is given: never more than it may have, never none, and what the cores about it allow."""

from __future__ import annotations

import time

import pytest
import torch

from server.worker.share import Moment, Share, threads
from unbind_core.progress import Progress


@pytest.mark.parametrize(
    ("cores", "most", "expected"),
    [(0.0, 2, 1), (0.7, 2, 1), (1.3, 2, 1), (1.65, 2, 2), (2.0, 2, 2), (2.0, 1, 1), (7.8, 4, 4), (7.8, 16, 8)],
)
def test_a_thread_for_every_core_that_is_there(cores: float, most: int, expected: int) -> None:
    assert threads(cores, most) == expected


def test_a_stage_beside_busy_processes_gets_one_thread_and_all_of_them_without() -> None:
    # seconds on the clock, of this process, of all processors without work: alone on two cores, then beside another
    found = iter([Moment(0, 0, 0), Moment(0.5, 0, 0.1), Moment(1, 1, 1), Moment(2, 2, 1), Moment(3, 3, 2)])
    told, set_to = list[Progress](), list[int]()
    before = torch.get_num_threads()
    try:
        watching = Share(2, lambda: next(found)).watching(told.append)
        for _ in range(4):
            watching(Progress("detector", 1, 2))
            set_to.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert set_to == [before, 2, 1, 2]  # less than a second after the last look nothing is changed
    assert told == [Progress("detector", 1, 2)] * 4


def test_a_moment_counts_the_work_of_this_process() -> None:
    before = Moment.now()
    while time.process_time() < before.used + 0.02:
        sum(range(1000))
    after = Moment.now()
    assert after.used - before.used >= 0.02 and after.clock > before.clock and after.idle >= before.idle
