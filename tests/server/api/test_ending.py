"""What waits and what is cut: the end of a server at its limit, how long refused clients are sent away, scrapes of a busy one."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import iscoroutinefunction
from pathlib import Path

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from server.api import health
from server.api.inference import chat, completions, infill
from server.engine.embedded.pace import LEAST, MOST, Pace
from server.engine.letters import Letters
from server.engine.request import Delta
from tests.support.live import TIMEOUT, Live, live, until

ENDLESS = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def slow(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """One slot, two places in the queue, a hundredth of a second a token and a twentieth to end."""
    with live(checkpoint, tmp_path, max_model_len=512, max_slots=1, queue_limit=2, drain_timeout=0.05) as running:
        publish = running.service.engine.stepper._publish
        monkeypatch.setattr(running.service.engine.stepper, "_publish", lambda *a: (time.sleep(0.01), publish(*a))[1])
        yield running


def test_what_runs_at_the_limit_ends_with_the_error_and_done(slow: Live, caplog: pytest.LogCaptureFixture) -> None:
    engine = slow.service.engine
    with ThreadPoolExecutor(3) as pool, caplog.at_level(logging.WARNING, "unbind"):
        stream = pool.submit(slow.complete, **ENDLESS, stream=True)
        until(lambda: engine.stats().running == 1)
        waiting = pool.submit(slow.complete, **ENDLESS, stream=True, n=1)
        whole = pool.submit(slow.complete, **ENDLESS)
        until(lambda: engine.stats().waiting == 2)
        asyncio.run(slow.service.drain())
        *_, error, done = stream.result(TIMEOUT).events
        assert done == "[DONE]" and error["error"]["code"] == "shutting_down"
        assert error["error"]["type"] == "service_unavailable_error"
        for unbegun in (waiting, whole):  # a stream that has no token yet can still be given its status
            assert (unbegun.result(TIMEOUT).status, unbegun.result().error["code"]) == (503, "shutting_down")
    assert "1 requests that still ran and 2 that waited after 0.05 s" in caplog.text
    assert engine.stats().running == engine.stats().waiting == 0
    assert slow.call("/metrics").status == 200 and slow.complete().status == 503


def test_what_a_second_signal_ends_is_told_once(slow: Live, caplog: pytest.LogCaptureFixture) -> None:
    async def twice() -> None:
        patient = asyncio.create_task(slow.service.end_requests(TIMEOUT))
        await asyncio.to_thread(until, lambda: slow.service.engine.draining)
        await asyncio.gather(slow.service.end_requests(0), patient)

    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING, "unbind"):
        stream = pool.submit(slow.complete, **ENDLESS, stream=True)
        until(lambda: slow.service.engine.stats().running == 1)
        asyncio.run(twice())
        assert stream.result(TIMEOUT).events[-1] == "[DONE]"
    told = [record.getMessage() for record in caplog.records if "still ran" in record.getMessage()]
    assert len(told) == 1 and "after 0 s" in told[0]


def test_a_server_that_ends_with_nothing_to_do_says_nothing(slow: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "unbind"):
        asyncio.run(slow.service.drain())
    assert "still ran" not in caplog.text


def test_a_scrape_does_not_wait_for_the_step_that_runs(slow: Live) -> None:
    slow.complete(unbind={"modules": ["one"]})
    assert "unbind_gate_evaluations_total{" in slow.call("/metrics").raw.decode()
    hold = threading.Event()
    held = slow.service.engine.call(lambda: hold.wait(TIMEOUT))
    try:
        for _ in range(3):
            scraped = slow.call("/metrics")
            assert scraped.status == 200 and "unbind_gate_evaluations_total{" in scraped.raw.decode()
        assert len(slow.service.engine._errands) <= 1  # scrapes do not pile up
        assert not held.done()
    finally:
        hold.set()


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_before_the_first_token_is_no_error_of_the_server(slow: Live, stream: bool) -> None:
    hold = threading.Event()
    slow.service.engine.call(lambda: hold.wait(TIMEOUT))
    try:
        connection = http.client.HTTPConnection("127.0.0.1", slow.port, timeout=TIMEOUT)
        body = json.dumps({"prompt": "def add(", **ENDLESS, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        counted = slow.service.telemetry.requests
        connection.close()
        until(lambda: counted.labels("/v1/completions", "499")._value.get() == 1)
    finally:
        hold.set()
    assert 'unbind_requests_total{route="/v1/completions",status="500"}' not in slow.call("/metrics").raw.decode()


def test_who_leaves_within_the_body_is_counted_as_gone_and_not_as_wrong(slow: Live) -> None:
    with socket.create_connection(("127.0.0.1", slow.port), timeout=TIMEOUT) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 64\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt": "def ')
        time.sleep(0.1)
    counted = slow.service.telemetry.requests
    until(lambda: counted.labels("/v1/completions", "499")._value.get() == 1)
    assert 'unbind_requests_total{route="/v1/completions",status="400"}' not in slow.call("/metrics").raw.decode()
    assert slow.complete(prompt=[-1]).status == 400  # a whole body that is wrong is counted as before
    assert 'unbind_requests_total{route="/v1/completions",status="400"} 1' in slow.call("/metrics").raw.decode()


def test_a_full_queue_sends_clients_away_for_as_long_as_it_takes(slow: Live) -> None:
    engine = slow.service.engine
    engine.stepper.pace._gaps.extend([7.0] * 64)  # the latest requests left every seven seconds
    with ThreadPoolExecutor(3) as pool:
        hold = threading.Event()
        try:
            waiting = [pool.submit(slow.complete, max_tokens=2) for _ in range(3)]
            engine.call(lambda: hold.wait(TIMEOUT))
            until(lambda: engine.stats().running + engine.stats().waiting == 3 or any(w.done() for w in waiting))
            assert not any(one.done() for one in waiting)
            refused = slow.complete()
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert 14 <= int(refused.headers["retry-after"]) <= 22
        finally:
            hold.set()


def test_a_probe_and_a_request_for_inference_take_no_thread_but_the_loop_s() -> None:
    def calls(dependant: Dependant) -> list[Callable[..., object]]:
        inner = [call for one in dependant.dependencies for call in calls(one)]
        return [dependant.call, *inner] if dependant.call is not None else inner

    for router in (health, completions, chat, infill):
        for route in router.router.routes:
            assert isinstance(route, APIRoute)
            assert all(iscoroutinefunction(call) for call in calls(route.dependant)), route.path


def test_deltas_are_handed_over_a_few_streams_at_a_turn_and_in_order() -> None:
    async def run() -> None:
        letters, queues = Letters(), [asyncio.Queue[Delta]() for _ in range(100)]
        for text in ("a", "b"):
            letters.take(dict.fromkeys(queues, (Delta(text), Delta(text * 2))))
        waiting = []
        while queues[-1].qsize() != 4:
            waiting.append(sum(queue.empty() for queue in queues))
            await asyncio.sleep(0)  # whoever else the loop serves has a turn here
        assert waiting[:3] == [92, 84, 76]
        for queue in queues:
            assert [queue.get_nowait().text for _ in range(4)] == ["a", "aa", "b", "bb"]

    asyncio.run(run())


def test_the_pace_is_that_of_a_queue_that_was_never_empty() -> None:
    pace = Pace(slots=4)
    assert pace.seconds(100, now=0.0) == LEAST
    pace.look(True, now=0.0)
    assert pace.seconds(100, now=2.0) == 50  # four run, and are taken to be about to end
    for second in range(1, 11):
        pace.left(now=2.0 * second)
    assert pace.seconds(10, now=20.0) == 20 and pace.seconds(1000, now=20.0) == MOST
    assert pace.seconds(10, now=40.0) == 40  # nothing has left for a while
    pace.look(False, now=41.0)
    pace.left(now=500.0)  # hours with little to do say nothing of how fast it can go
    pace.look(True, now=600.0)
    assert pace.seconds(10, now=600.0) == 20
