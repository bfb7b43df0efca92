"""A start of vLLM's processes, which may take minutes, ends with the server that waits for it and leaves nothing behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from transformers import AutoTokenizer

from server import demo
from server.engine.refusals import EngineStopped
from server.engine.vllm import starts
from server.engine.vllm.arguments import Arguments
from server.engine.vllm.engine import VllmEngine
from server.engine.vllm.model import Model
from tests.support.programs import ENVIRONMENT
from tests.support.repository import ROOT
from unbind_core.errors import UnbindError
from unbind_core.identity import ModelIdentity

LOADING: list[BaseProcess] = []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmEngine]:
    async def started(*_: object) -> Model:
        """As vLLM: holds the loop while a process, and one of its own, load."""
        command = [sys.executable, "-c", "import time; time.sleep(30)"]
        process = multiprocessing.get_context("spawn").Process(target=subprocess.run, args=(command,))
        process.start()
        LOADING.append(process)
        process.join()
        raise UnbindError("vLLM does not start")

    monkeypatch.setattr(Model, "started", started)
    LOADING.clear()
    tokenizer, identity = AutoTokenizer.from_pretrained(demo.BASE), ModelIdentity("f" * 64, "", 6, 8, 8192)
    yield VllmEngine(Arguments("", "float32", 512, 2, 64, "cpu"), tokenizer, identity, {}, 8192, 4)
    for process in LOADING:
        process.kill()


def loading() -> list[psutil.Process]:
    """The process that loads, and its own, once both are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if LOADING and (own := psutil.Process(LOADING[-1].pid).children()):
            return [psutil.Process(LOADING[-1].pid), *own]
        time.sleep(0.02)
    raise AssertionError("nothing loads")


def ended(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, 20)[1]


def test_a_start_that_is_given_up_says_so_and_ends_what_loads(engine: VllmEngine) -> None:
    said: list[Exception] = []

    def start() -> None:
        try:
            engine.start()
        except EngineStopped as error:
            said.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    found = loading()
    engine.give_up()
    thread.join(60)
    engine.close()
    assert said and ended(found) and LOADING[0].exitcode == -signal.SIGKILL


def test_an_engine_that_is_closed_while_its_processes_start_again_ends_them(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "BACKOFF_SECONDS", (0.0,))
    engine._thread.start()

    async def again() -> None:
        engine._background.append(asyncio.ensure_future(engine._again()))

    engine._await(again())
    found = loading()
    engine.close()
    assert ended(found) and LOADING[0].exitcode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_is_told_to_end_while_vllm_starts_never_listens_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    flags = ("--engine", "vllm", "--no-worker", "--json", "--port", "0", "--data-dir", str(tmp_path / "data"))
    with TemporaryDirectory() as short:  # a socket's path may have 107 bytes
        serving = subprocess.Popen(
            [sys.executable, "-m", "server", "serve", *flags],
            cwd=ROOT,
            env=ENVIRONMENT | {"TMPDIR": short, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
        )
        try:
            server = psutil.Process(serving.pid)
            while len(found := server.children(recursive=True)) < 2:  # multiprocessing's own, and the first of vLLM's
                assert serving.poll() is None
                time.sleep(0.05)
            os.kill(serving.pid, number)
            said, told = serving.communicate(timeout=300)
        finally:
            serving.kill()
        assert (serving.returncode, said) == (-signal.SIGTERM, "")
        assert "the start was given up" in told and "Traceback" not in told
        assert ended(found) and not list(Path(short).glob("unbind-*"))
