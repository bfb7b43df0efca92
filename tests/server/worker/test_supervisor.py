"""The supervisor in the server: whatever happens once, it goes on, and there is one worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from server.settings import Settings
from server.worker.process import Supervisor


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


def program(path: Path, lines: str) -> Path:
    """A worker, put where it is started from."""
    made = path.with_suffix(".new")
    made.write_text(f"#!/bin/sh\n{lines}\n")
    made.chmod(0o700)
    return made.rename(path)


def test_a_worker_that_cannot_be_started_once_is_started_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def supervise() -> None:
        supervisor = Supervisor(Settings(data_dir=tmp_path), [str(tmp_path / "worker")])
        await supervisor.start()
        await until(lambda: supervisor.restarts == 1)
        assert supervisor.pid is None
        program(tmp_path / "worker", "exec sleep 60")
        await until(lambda: supervisor.pid is not None)
        await supervisor.stop()
        assert supervisor.pid is None

    with caplog.at_level(logging.ERROR, "unbind.worker"):
        asyncio.run(supervise())
    assert "the worker is given up; starting another" in caplog.text and "No such file" in caplog.text


def test_a_worker_that_says_nonsense_is_ended_before_another_is_started(tmp_path: Path) -> None:
    worker = program(tmp_path / "worker", f"echo $$ >> {tmp_path}/started; echo nonsense; exec sleep 60")

    async def supervise() -> None:
        supervisor = Supervisor(Settings(data_dir=tmp_path), [str(worker)])
        await supervisor.start()
        await until(lambda: supervisor.restarts == 1)
        (pid,) = (tmp_path / "started").read_text().split()
        assert not psutil.pid_exists(int(pid))
        await until(lambda: len((tmp_path / "started").read_text().split()) == 2)
        await supervisor.stop()

    asyncio.run(supervise())
