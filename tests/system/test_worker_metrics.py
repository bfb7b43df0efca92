"""What a worker tells of its work: to the server that runs it, and on a port of its own where none does."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from server.telemetry.work import Work
from server.worker.process import BEAT, Heart, Supervisor, python
from tests.system.conftest import ROOT
from tests.system.workshop import workshop


def samples(text: bytes) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_a_server_hears_what_its_worker_has_done_and_counts_its_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    registry = CollectorRegistry()
    with workshop(tmp_path) as shop:
        made, failing = shop.submit("m"), shop.submit("n", fails="check")
        supervisor = Supervisor(shop.settings, python("tests.support.fast_stages", "worker"), Work(registry).take)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(supervisor.start(), loop).result(10)
            done, failed = shop.ended(made, failing, seconds=90)
            shop.wait(lambda: b'{state="failed"}' in generate_latest(registry), 30)
            found = samples(generate_latest(registry))
            assert (done["state"], failed["state"], supervisor.restarts) == ("succeeded", "failed", 0)
            assert [found[f'unbind_worker_jobs_total{{state="{state}"}}'] for state in ("succeeded", "failed")] == [
                1,
                1,
            ]
            for stage, seconds in done["timings"].items():
                assert found[f'unbind_job_stage_seconds_count{{stage="{stage}"}}'] == 1
                assert found[f'unbind_job_stage_seconds_sum{{stage="{stage}"}}'] == pytest.approx(seconds)
            os.kill(supervisor.pid or 0, signal.SIGKILL)
            shop.wait(lambda: supervisor.restarts == 1, 30)
        finally:
            asyncio.run_coroutine_threadsafe(supervisor.stop(), loop).result(20)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def test_a_worker_of_its_own_shows_its_metrics_on_its_port(tmp_path: Path) -> None:
    with workshop(tmp_path, worker_metrics_port=0) as shop:
        shop.start()
        shop.ended(shop.submit("m"), seconds=90)
        shop.wait(lambda: any("/metrics" in line for line in shop.log))
        address = re.search(r"http://\S+/metrics", "".join(shop.log))
        assert address is not None

        def scraped() -> dict[str, float]:
            with urlopen(address[0], timeout=10) as answer:
                return samples(answer.read())

        shop.wait(lambda: scraped().get('unbind_worker_jobs_total{state="succeeded"}') == 1)
        found = scraped()
        assert found["unbind_worker_up"] == 1 and found["process_resident_memory_bytes"] > 0
        assert found['unbind_job_stage_seconds_count{stage="fit"}'] == 1
        assert any(name.startswith("unbind_build_info{") and 'engine="worker"' in name for name in found)


def test_news_that_do_not_fit_into_the_pipe_come_with_a_later_beat() -> None:
    reading, writing = os.pipe()
    heart: Any = Heart.__new__(Heart)
    heart._pipe, heart._unsent = writing, b""
    os.set_blocking(writing, False)
    try:
        for number in range(3000):  # more than a pipe holds
            heart.tell({"stage": "fit", "seconds": number + 0.5})
        said = b""
        while heart._unsent or not said.endswith(BEAT):
            said += os.read(reading, 1 << 16)
            heart.beat()
        assert said.count(b'"seconds"') == 3000 and said.rstrip(BEAT).endswith(b'"seconds": 2999.5}\n')
    finally:
        os.close(reading)
        os.close(writing)
