"""Limits of connections, asked with raw sockets: what never ends, never comes or never stops."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.cli.starting.loading import bind, not_ready
from server.engine.embedded.scheduler import Plan
from server.settings import Settings
from tests.support.live import Live, live, until

ASK = {"prompt": "def add(", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def bounded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with short time limits."""
    limits: dict[str, Any] = {
        "header_timeout": 0.4,
        "body_timeout": 0.4,
        "keep_alive_timeout": 1,
        "max_connections": 30,
        "max_header_bytes": 4096,
        "max_headers": 20,
        "max_model_len": 512,
    }
    with live(checkpoint, tmp_path_factory.mktemp("bounded"), **limits) as running:
        yield running


@contextmanager
def connected(port: int, sent: bytes = b"") -> Iterator[socket.socket]:
    """A connection on which something was sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as made:
        made.sendall(sent)
        yield made


@contextmanager
def half_closed(port: int, sent: bytes) -> Iterator[socket.socket]:
    """A connection whose end comes in one packet with what was sent."""
    with connected(port) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        made.sendall(sent)
        made.shutdown(socket.SHUT_WR)
        yield made


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def request(body: Any = None, headers: str = "", path: str = "/v1/completions") -> bytes:
    """A request as bytes."""
    raw = json.dumps(ASK if body is None else body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def refused(answer: bytes, status: int, code: str) -> None:
    """The answer is one error object and the connection ends with it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head, answer[:300]
    assert json.loads(body)["error"]["code"] == code


def test_a_header_that_never_ends_is_refused_while_it_is_sent(bounded: Live) -> None:
    with connected(bounded.port, b"GET /health HTTP/1.1\r\nX: ") as connection:
        sent = 0
        with pytest.raises(OSError):  # noqa: PT012 - which write fails is the system's choice
            while sent < 200_000_000:
                sent += connection.send(b"x" * 65536)
        assert sent < 200_000_000


@pytest.mark.parametrize(
    "head", [b"X: " + b"x" * 5000, b"".join(b"X-%d: 1\r\n" % n for n in range(30)), b"X: 1\r\n" * 30]
)
def test_a_head_over_the_limits_gets_431(bounded: Live, head: bytes) -> None:
    with connected(bounded.port, b"GET /health HTTP/1.1\r\n" + head + b"\r\n\r\n") as connection:
        refused(read_all(connection), 431, "headers_too_large")
    with connected(bounded.port, b"GET /" + b"x" * 9000) as connection:  # an address without an end
        refused(read_all(connection), 431, "headers_too_large")


def test_trailers_and_chunk_extensions_without_an_end_are_refused(bounded: Live) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(bounded.port, head) as connection:
        time.sleep(0.05)
        connection.sendall(b"1;x=" + b"x" * 20_000)
        refused(read_all(connection), 431, "headers_too_large")
    with connected(bounded.port, head + b"1\r\n{\r\n0\r\n") as connection:
        time.sleep(0.05)
        connection.sendall(b"X: " + b"x" * 20_000)
        assert b" 431 " in read_all(connection)


def test_a_trailer_is_no_header(bounded: Live) -> None:
    """What stands in front of the server has not seen it."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    body = json.dumps(ASK)
    chunks = f"Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\nX-Unbind-Modules: unheard-of\r\n\r\n"
    with connected(bounded.port, (head + chunks).encode()) as connection:
        assert b" 200 " in read_all(connection).partition(b"\r\n")[0]


def test_what_is_no_http_gets_an_error_object(bounded: Live) -> None:
    with connected(bounded.port, b"\x16\x03\x01 nonsense\r\n\r\n") as connection:
        refused(read_all(connection), 400, "invalid_http")


@pytest.mark.parametrize("begun", [b"GET /health HTTP/1.1\r\nX-A: ", b"GET /health HTTP/1.1\r\n", b"\r\n"])
def test_a_head_that_does_not_arrive_in_time_gets_408_however_it_drips(bounded: Live, begun: bytes) -> None:
    with connected(bounded.port, begun) as connection:
        connection.settimeout(0.05)
        answer = b""
        deadline = time.monotonic() + 20
        while not answer and time.monotonic() < deadline:
            connection.sendall(b"\n" if begun == b"\r\n" else b"a")
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                continue
        refused(answer, 408, "header_timeout")


def test_a_body_that_does_not_arrive_in_time_gets_408(bounded: Live) -> None:
    whole = request()
    with connected(bounded.port, whole[:-5]) as connection:
        refused(read_all(connection), 408, "body_timeout")
    with connected(bounded.port, whole) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_who_has_the_connection_closed_may_send_its_body_to_the_end_and_reads_why_it_was_refused(
    bounded: Live, version: bytes
) -> None:
    whole = request("x" * 5_000_000, "Connection: close\r\n").replace(b"HTTP/1.1", b"HTTP/" + version, 1)
    with connected(bounded.port, whole[:100_000]) as connection:
        answer = connection.recv(65536)
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        refused(answer, 413, "body_too_large")
        connection.sendall(whole[100_000:])
        assert read_all(connection) == b""
    with connected(bounded.port, whole[:100_000]) as connection:  # no more comes
        refused(read_all(connection), 413, "body_too_large")


def test_hundreds_of_idle_and_half_sent_connections_are_closed_and_the_server_answers_health_meanwhile(
    bounded: Live,
) -> None:
    with ExitStack() as stack:
        held = [
            stack.enter_context(connected(bounded.port, (b"", b"GET / HT", request()[:-9], b"\r\n")[number % 4]))
            for number in range(50)
        ]
        assert bounded.call("/health").status == 200
        full = bounded.complete()
        assert (full.status, full.error["code"]) == (503, "too_many_connections")
        assert full.headers["retry-after"] == "2" and full.headers["connection"] == "close"
        over = [stack.enter_context(connected(bounded.port)) for _ in range(30)]  # beyond twice the limit
        for connection in (*held, *over):
            try:
                assert read_all(connection).count(b"HTTP/1.1") <= 1
            except ConnectionResetError:
                continue
    assert bounded.complete().status == 200


def test_a_connection_kept_alive_is_closed_when_it_asks_nothing(bounded: Live) -> None:
    with connected(bounded.port, request()) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 200")  # and its end, which waits for the server
    with connected(bounded.port, request(path="/nowhere")[:-3]) as connection:  # answered before its body has come
        assert read_all(connection).count(b"HTTP/1.1 40") == 1


def test_pipelined_requests_are_answered_in_order(bounded: Live) -> None:
    ids = [f"number-{number}" for number in range(8)]
    burst = b"".join(request(headers=f"X-Request-Id: {name}\r\n") for name in ids)
    with connected(bounded.port, burst) as connection:
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200 OK") == len(ids)
    places = [answers.index(b"x-request-id: " + name.encode()) for name in ids]
    assert places == sorted(places)


OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


def test_a_request_that_offers_http_2_as_javas_client_does_is_answered_and_so_are_those_behind_it(
    bounded: Live,
) -> None:
    length = len(json.dumps(ASK))
    chunked = request(headers=OFFER + "Transfer-Encoding: chunked\r\n").replace(b"Content-Length: %d\r\n" % length, b"")
    head, _, body = chunked.partition(b"\r\n\r\n")
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:])) + b"0\r\n\r\n"
    bare = f"GET /health HTTP/1.1\r\nHost: localhost\r\n{OFFER}\r\n".encode()
    asked = [request(headers=OFFER), bare, head + b"\r\n\r\n" + chunks, request(), bare, request({}, OFFER)]
    for step in (None, 1, 50):  # as one piece, or with a pause before its last bytes, or among its body
        with connected(bounded.port) as connection:
            whole = b"".join(asked)
            if step is None:
                connection.sendall(whole)
            else:
                cut = whole.index(b'{"prompt"') + 5 if step == 1 else len(whole) - step
                connection.sendall(whole[:cut])
                time.sleep(0.05)
                connection.sendall(whole[cut:])
            answers = read_all(connection)
        statuses = [int(line[9:12]) for line in answers.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        assert answers.count(b"HTTP/1.1 ") == len(asked), answers
        assert answers.count(b'"object":"text_completion"') == 3
        assert answers.count(b'{"status":"ok"}') == 2
        assert b"prompt" in answers.rpartition(b"HTTP/1.1 4")[2], statuses


@pytest.mark.parametrize(
    ("version", "connection"), [("1.1", "Upgrade, close"), ("1.1", "close, Upgrade"), ("1.0", "Upgrade")]
)
def test_who_offers_http_2_and_has_the_connection_closed_behind_the_answer_gets_it(
    bounded: Live, version: str, connection: str
) -> None:
    asked = request(headers=f"Connection: {connection}\r\nUpgrade: h2c\r\n").replace(b"1.1", version.encode(), 1)
    with connected(bounded.port, asked) as opened:
        answer = read_all(opened)
    assert answer.startswith(b"HTTP/1.1 200") and b'"object":"text_completion"' in answer


def test_who_speaks_http_1_0_gets_the_answer_alone_whatever_they_expect(bounded: Live) -> None:
    asked = request(headers="Expect: 100-continue\r\n")
    for version, begins in ((b"1.1", b"HTTP/1.1 100"), (b"1.0", b"HTTP/1.1 200")):
        with connected(bounded.port, asked.replace(b"1.1", version, 1)) as opened:
            answer = read_all(opened)
        assert answer.startswith(begins) and b'"object":"text_completion"' in answer


def test_a_head_over_the_limits_that_offers_http_2_gets_431_and_a_late_body_408(bounded: Live) -> None:
    with connected(bounded.port, request(headers=OFFER + "X: 1\r\n" * 30)) as connection:
        refused(read_all(connection), 431, "headers_too_large")
    with connected(bounded.port, request(headers=OFFER)[:-3]) as connection:
        refused(read_all(connection), 408, "body_timeout")


def test_http_1_0_gets_streams_without_chunks(bounded: Live) -> None:
    asked = request({**ASK, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    with connected(bounded.port, asked) as connection:
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    events = body.split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events[:-1])
    assert events[-2:] == [b"data: [DONE]", b""]
    with connected(bounded.port, request().replace(b"HTTP/1.1", b"HTTP/1.0")) as connection:
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head


def test_more_pipelined_requests_than_are_held_end_the_connection(bounded: Live) -> None:
    with connected(bounded.port, request({**ASK, "max_tokens": 40}) + b"GET / HTTP/1.1\r\n\r\n" * 500) as connection:
        assert read_all(connection).count(b"HTTP/1.1") <= 1
    assert bounded.complete().status == 200


def test_a_client_that_takes_nothing_of_its_answers_and_stays_is_given_up(checkpoint: Path, tmp_path: Path) -> None:
    """Its answers are more than its system and the server's hold for it: 60 of over 80 kB."""
    large = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60
    with live(checkpoint, tmp_path, request_timeout=0.5, max_connections=2) as running, ExitStack() as stack:
        held = [stack.enter_context(connected(running.port, large)) for _ in range(4)]
        ended = select.poll()
        for connection in held:
            ended.register(connection, select.POLLRDHUP)
        until(lambda: len(ended.poll(0)) == len(held))
        assert running.call("/ready").status == 200


@contextmanager
def slow(server: Live) -> Iterator[list[float]]:
    """Each decode step takes 0.03 s; when each began."""
    forward = server.service.engine.runner.forward
    steps: list[float] = []

    def slowly(plan: Plan) -> Any:
        if plan.decode:
            steps.append(time.monotonic())
            time.sleep(0.03)
        return forward(plan)

    server.service.engine.runner.forward = slowly  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        server.service.engine.runner.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_behind_its_request_is_answered(bounded: Live, version: bytes, stream: bool) -> None:
    asked = request({**ASK, "stream": stream}).replace(b"HTTP/1.1", version)
    with half_closed(bounded.port, asked) as connection:
        head, _, body = read_all(connection).rpartition(b"HTTP/1.1 200 OK\r\n")[2].partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"[DONE]" in body if stream else json.loads(body)["choices"]


def test_all_that_a_half_closed_connection_has_asked_is_answered_in_order(bounded: Live) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    long = {**ASK, "max_tokens": 30, "ignore_eos": True}
    with slow(bounded), half_closed(bounded.port, request(long) + health + request(long)) as connection:
        answers = read_all(connection).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 200 OK")
    assert [b"text_completion" in one for one in answers] == [False, True, False, True], answers


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_stops_soon_after_its_client_has_left(bounded: Live, stream: bool) -> None:
    with slow(bounded) as steps:
        with connected(bounded.port, request({**ASK, "max_tokens": 400, "ignore_eos": True, "stream": stream})):
            until(lambda: len(steps) > 2)
        until(lambda: time.monotonic() - steps[-1] > 0.5)
        assert len(steps) < 100


def test_a_request_that_half_closes_within_its_body_is_not_answered(bounded: Live) -> None:
    with half_closed(bounded.port, request()[:-1]) as connection:
        assert read_all(connection) == b""


def test_a_stream_longer_than_every_time_limit_runs_to_its_end(bounded: Live) -> None:
    with slow(bounded):
        body = {**ASK, "max_tokens": 50, "ignore_eos": True, "stream": True}
        began = time.monotonic()
        with connected(bounded.port, request(body) + b"GET /health HTTP/1.1\r\nHost: ") as connection:
            # behind the stream half of the next request waits for longer than a head may take
            seen = b""
            while b"[DONE]" not in seen:
                seen += connection.recv(65536)
            assert time.monotonic() - began > 1.2
            connection.sendall(b"localhost\r\nConnection: close\r\n\r\n")
            assert b'{"status":"ok"}' in read_all(connection)


def test_the_port_has_the_same_limits_while_the_model_loads() -> None:
    settings = Settings(header_timeout=0.3, keep_alive_timeout=1, max_header_bytes=4096, max_connections=5)
    with bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with not_ready(bound, settings):
            with connected(port, b"GET /health HTTP/1.1\r\nX: " + b"x" * 9000) as connection:
                refused(read_all(connection), 431, "headers_too_large")
            with connected(port, b"GET /he") as connection:
                refused(read_all(connection), 408, "header_timeout")
            before = threading.active_count()
            with ExitStack() as stack:
                for _ in range(8):
                    stack.enter_context(connected(port))
                with connected(port, request()) as connection:
                    refused(read_all(connection), 503, "too_many_connections")
                assert threading.active_count() == before


@pytest.mark.parametrize(("hard", "allowed", "warned"), [(4096, 1000, False), (600, 600, True)])
def test_a_server_may_open_as_many_files_as_its_connections_take_or_warns(
    hard: int, allowed: int, warned: bool
) -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, %d)); "
        "from server.http.connections import allow_descriptors; "
        "from server.settings import Settings; allow_descriptors(Settings(max_connections=400)); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", script % hard], capture_output=True, text=True, check=True)
    assert int(done.stdout) == allowed
    assert ("max_connections: 400 connections may take 1000 open files, and 600 are allowed" in done.stderr) == warned
