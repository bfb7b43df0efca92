"""Time, size, origins and log lines; errors in the middle of a stream."""

from __future__ import annotations

import http.client
import json
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.engine.embedded.scheduler import Plan
from server.logs import JsonFormatter
from tests.support.live import TIMEOUT, Live, fail_at, live, until


def test_a_request_that_takes_too_long_is_given_up(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(checkpoint, tmp_path, request_timeout=0.15, max_model_len=512) as running:
        endless = {"max_tokens": 480, "ignore_eos": True}
        hold = threading.Event()
        running.service.engine.call(lambda: hold.wait(2))  # the engine is busy, as behind a long prompt
        for stream in (False, True):
            late = running.complete(**endless, stream=stream)
            assert (late.status, late.error["code"]) == (504, "request_timeout")
            assert late.headers["x-should-retry"] == "false" and late.headers["x-request-id"]
            assert (
                "wait in the queue" in late.error["message"]
            )  # none of it was computed: fewer tokens alone help nobody
        hold.set()
        forward = running.service.engine.runner.forward

        def slow(plan: Plan) -> object:
            time.sleep(0.05 if plan.decode else 0)
            return forward(plan)

        monkeypatch.setattr(running.service.engine.runner, "forward", slow)
        streamed = running.complete(**endless, stream=True)
        assert streamed.status == 200 and streamed.events[-1] == "[DONE]"
        assert streamed.events[-2]["error"]["code"] == "request_timeout"
        until(lambda: running.service.engine.stats().running == 0)


def test_an_engine_that_fails_in_mid_stream_ends_it_with_an_error_object(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(server, monkeypatch, step=3)
    answer = server.complete(stream=True)
    assert answer.status == 200 and answer.events[-1] == "[DONE]"
    error = answer.events[-2]["error"]
    assert error["type"] == "server_error" and "RuntimeError" in error["message"] and "no more" not in error["message"]
    assert server.complete().status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/fim/completions", "/infill"])
def test_a_stream_that_fails_before_its_first_token_is_an_error_with_its_status(
    server: Live, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def failing(*_: object) -> object:
        raise RuntimeError("no prompt today")

    monkeypatch.setattr(server.service.engine.runner, "forward", failing)
    prompt = {"prompt": "def a(", "messages": [{"role": "user", "content": "hello"}], "input_prefix": "def a("}
    answer = server.call(path, {**prompt, "stream": True})
    assert (answer.status, answer.error["code"]) == (500, "engine_error")
    assert answer.headers["x-should-retry"] == "false" and answer.headers["content-type"] == "application/json"


def test_a_page_of_an_allowed_origin_may_ask(checkpoint: Path, tmp_path: Path, server: Live) -> None:
    ask = {"Origin": "https://ide.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.call("/v1/models", headers=ask).headers
    with live(checkpoint, tmp_path, cors_origins="https://ide.example,https://other.example") as running:
        allowed = running.call("/v1/completions", headers=ask, method="OPTIONS")
        assert allowed.headers["access-control-allow-origin"] == "https://ide.example"
        answer = running.complete(headers={"Origin": "https://ide.example"})
        shown = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert set(shown) == {"x-unbind-modules", "x-request-id", "request-id", "retry-after", "x-should-retry"}
        stranger = running.complete(headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_a_body_that_grows_over_the_limit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, max_body_bytes=2048) as running:
        assert running.complete(prompt="x" * 4000).error["code"] == "body_too_large"
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
        chunks = (b'{"prompt": "' + b"x" * 1024 for _ in range(8))
        connection.request("POST", "/v1/completions", chunks, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
        assert running.complete().status == 200


def test_log_lines_name_the_request_by_its_id_and_never_its_text(
    server: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.api.inference.bodies.generation._noticed", set())  # others may have filled it
    with caplog.at_level(logging.INFO, "unbind"):
        answer = server.complete(
            prompt="my secret code", unheard_of=1, headers={"X-Request-Id": "abc-1"}, path="/p/safe/v1/completions"
        )
        server.complete(prompt="my secret code", unheard_of=2)
        until(lambda: any(getattr(record, "request_id", "") == "abc-1" for record in caplog.records))
    assert answer.headers["x-request-id"] == "abc-1"
    (record,) = (record for record in caplog.records if getattr(record, "request_id", "") == "abc-1")
    line = json.loads(JsonFormatter().format(record))
    assert (line["route"], line["status"], line["profile"]) == ("/v1/completions", 200, "safe") and line["seconds"] > 0
    assert "secret" not in caplog.text
    assert sum("unheard_of" in entry.getMessage() for entry in caplog.records) == 1
    forged = server.complete(headers={"X-Request-Id": "x" * 500})
    assert len(forged.headers["x-request-id"]) == 32


def test_a_json_log_line_is_one_line_with_its_exception() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("unbind", logging.ERROR, "f", 1, "what\nhappened %s", ("now",), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "what\nhappened now" and "ValueError" in line["exception"] and line["level"] == "error"


def test_a_server_that_ends_sends_newcomers_away_and_lets_running_streams_finish(
    checkpoint: Path, tmp_path: Path
) -> None:
    with live(checkpoint, tmp_path) as running, ThreadPoolExecutor(2) as pool:
        engine, hold = running.service.engine, threading.Event()
        stream = pool.submit(running.complete, max_tokens=150, ignore_eos=True, stream=True)
        until(lambda: engine.stats().running == 1)
        engine.call(lambda: hold.wait(TIMEOUT))  # or the stream may end before anybody else has come
        running.service.ready = False
        drained = pool.submit(engine.drain, TIMEOUT)
        until(lambda: engine.draining)
        for answer in (running.complete(), running.call("/ready")):
            assert answer.status == 503 and 0 < int(answer.headers["retry-after"]) <= 120
            assert "x-should-retry" not in answer.headers
        assert running.call("/health").status == 200
        hold.set()
        assert stream.result(TIMEOUT).events[-2]["choices"][0]["finish_reason"] == "length"
        assert drained.result(TIMEOUT)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(checkpoint: Path, tmp_path: Path, stream: bool) -> None:
    with live(checkpoint, tmp_path, max_model_len=512) as running:
        body = json.dumps({"prompt": "def a(", "max_tokens": 480, "ignore_eos": True, "stream": stream})
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        until(lambda: running.service.engine.stats().running == 1)
        steps = running.service.engine.stats().steps
        assert connection.sock is not None
        connection.sock.close()
        until(lambda: running.service.engine.stats().running == 0)
        assert running.service.engine.stats().steps < steps + 300
        connection.close()
