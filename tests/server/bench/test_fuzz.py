"""The fuzzing bench sends every kind of request to every route, and tells what breaks from what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

from server.bench.fuzz import HEALTH_SECONDS, attack
from server.bench.fuzz_requests import Requests
from tests.support.live import ADMIN_KEY, live


def test_a_server_that_refuses_everything_is_sound(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, max_model_len=48) as running:
        found = attack(
            running.url, ADMIN_KEY, requests=400, connections=3, seed=1, keep=tmp_path / "kept", tell=lambda _: None
        )
    assert found["requests"] == sum(found["kinds"].values()) == 400
    assert found["kinds"].keys() == {"json", "plain", "raw", "upload"}
    assert found["failed"] == 0 and not (tmp_path / "kept").exists(), found["failures"]
    assert found["statuses"]["200"] > 10 and found["statuses"]["400"] > 30 and found["health"]["polls"] > 10


def test_every_route_of_the_description_is_asked(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as running:
        description = running.call("/openapi.json").body
    requests = Requests(description, ["one"], Random(0))
    targets = {
        (call.method, call.target.split("?")[0]) for call in (requests.draw() for _ in range(4000)) if call.method
    }
    for path, operations in description["paths"].items():
        start = path.split("{")[0]
        for method in operations:
            assert any(sent == method.upper() and target.startswith(start) for sent, target in targets), (method, path)


@contextmanager
def stub(answer: bytes, health: float = 0.0) -> Iterator[str]:
    """A server that gives everything the same answer, and ``/health`` after so many seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"paths": {"/broken": {"get": {}}}, "data": []}'
            if self.path.startswith("/broken"):
                self.wfile.write(answer)
                return
            if self.path == "/health":
                time.sleep(health)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 500 Broken\r\nContent-Length: 4\r\n\r\nwhy?", b"why?"),
        (b"SSH-2.0-server\r\n\r\n", b"no HTTP"),
    ],
)
def test_what_breaks_a_server_is_kept_with_its_answer(answer: bytes, says: bytes, tmp_path: Path) -> None:
    with stub(answer) as url:
        found = attack(url, "", requests=30, connections=1, seed=0, keep=tmp_path, tell=lambda _: None)
    assert found["failed"] > 10 and not found["sound"]
    kept = next(Path(failure["file"]) for failure in found["failures"] if failure["kind"] == "plain").read_bytes()
    assert kept.startswith(b"GET /broken") and says in kept


def test_a_slow_health_is_not_sound(tmp_path: Path) -> None:
    with stub(b"HTTP/1.1 503 Later\r\nContent-Length: 0\r\n\r\n", health=HEALTH_SECONDS + 0.05) as url:
        found = attack(url, "", requests=1, connections=1, seed=0, keep=tmp_path, tell=lambda _: None)
    assert found["failed"] == 0 and found["health"]["over_the_promise"] and not found["sound"]
