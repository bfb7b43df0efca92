"""Passes side by side: they overlap, each with its share of the threads, and are told of as they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from unbind_core.cpu.lanes import Lanes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_passes_overlap_with_a_share_of_the_threads_each() -> None:
    lanes = Lanes(CPU)
    meet = threading.Barrier(2)

    def work() -> int:
        meet.wait(10)  # which only two at a time get past
        return torch.get_num_threads()

    try:
        assert sorted(lanes.run([work, work, work, work], together=True)) == [(i, 1) for i in range(4)]
        assert list(lanes.run([torch.get_num_threads], together=False)) == [(0, 2)]
    finally:
        lanes.close()


def test_passes_are_told_of_as_they_end() -> None:
    lanes = Lanes(CPU)
    release = threading.Event()
    try:
        found = lanes.run([lambda: release.wait(10), lambda: True], together=True)
        assert next(found) == (1, True)
        release.set()
        assert next(found) == (0, True)
    finally:
        lanes.close()


def test_leaving_early_waits_for_what_runs() -> None:
    lanes = Lanes(CPU)
    ended = threading.Event()

    def slow() -> None:
        time.sleep(0.2)
        ended.set()

    try:
        with closing(lanes.run([slow, lambda: None], together=True)) as found:
            next(found)
        assert ended.is_set()
    finally:
        lanes.close()


def test_one_thread_or_another_device_means_one_lane() -> None:
    torch.set_num_threads(1)
    for device in (CPU, torch.device("meta")):
        lanes = Lanes(device)
        assert lanes.count == 1
        assert list(lanes.run([threading.get_ident] * 2, together=True)) == [(i, threading.get_ident()) for i in (0, 1)]
        lanes.close()
