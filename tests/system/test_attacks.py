"""A real server under clients that mean it harm: what it holds afterwards, and whether others are answered meanwhile.

``-s`` prints the figures; they are not judged, as they are the machine's as much as the server's.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.conftest import ServerProcess, serving

pytestmark = pytest.mark.slow
CLIENTS = 8
LARGE = "q~ " * 2_600_000  # 7.8 MB, all of it tokens


@pytest.fixture(scope="module")
def attacked(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server without a worker that takes bodies of 16 MB from anybody."""
    folder = tmp_path_factory.mktemp("attacked")
    with serving(checkpoint, folder, worker=False, max_inference_bytes=16 * 2**20, header_timeout=2) as running:
        yield running


def memory(server: ServerProcess) -> float:
    """MiB that the process holds."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def under(server: ServerProcess, what: str, attack: Callable[[], object]) -> Counter[object]:
    """The outcomes of eight attackers, while ``/health`` is asked all the time and answers."""
    ended, seconds = threading.Event(), []

    def watch() -> None:
        while not ended.is_set():
            began = time.monotonic()
            assert server.call("/health")[0] == 200
            seconds.append(time.monotonic() - began)

    before = memory(server)
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        watching = pool.submit(watch)
        attacks = [pool.submit(attack) for _ in range(CLIENTS)]
        outcomes = Counter(running.result(120) for running in attacks)
        ended.set()
        watching.result(30)
    print(f"{what}: {dict(outcomes)}; /health at worst {max(seconds):.3f} s; {before:.0f} -> {memory(server):.0f} MiB")
    return outcomes


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LARGE}),
        ("/tokenize", {"content": LARGE, "with_pieces": True}),
        ("/detokenize", {"tokens": [100] * 900_000}),
        ("/v1/completions", {"prompt": [100] * 900_000}),
    ],
)
def test_large_prompts_are_refused_while_others_are_answered(
    attacked: ServerProcess, path: str, body: dict[str, object]
) -> None:
    raw = json.dumps(body).encode()
    before = memory(attacked)
    assert under(attacked, f"{len(raw)} bytes at {path}", lambda: attacked.call(path, raw)[0]) == {400: CLIENTS}
    assert memory(attacked) < before + 400  # a tokenised prompt took 1.6 GB


def test_headers_without_end_or_number_are_held_nowhere(attacked: ServerProcess) -> None:
    port = int(attacked.url.rsplit(":", 1)[1])

    def endless(piece: bytes) -> str:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            try:
                connection.sendall(b"GET / HTTP/1.1\r\n" + piece.partition(b":")[0] + b": ")
                for _ in range(141_000_000 // len(piece)):
                    connection.sendall(piece)
            except OSError:
                return "cut off"
        return "taken"

    before = memory(attacked)
    assert under(attacked, "a header without an end", lambda: endless(b"x" * 65536)) == {"cut off": CLIENTS}
    assert under(attacked, "headers without number", lambda: endless(b"X: 1\r\n" * 1000)) == {"cut off": CLIENTS}
    assert memory(attacked) < before + 50


def test_hundreds_of_connections_that_say_nothing_are_closed(attacked: ServerProcess) -> None:
    port = int(attacked.url.rsplit(":", 1)[1])
    held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(400)]
    for connection in held[::2]:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: loc")
    assert attacked.call("/health")[0] == 200
    for connection in held:
        while connection.recv(65536):
            continue
        connection.close()
    assert attacked.call("/health")[0] == 200
