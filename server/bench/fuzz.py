"""Hostile requests to a real server from several connections, while somebody asks ``/health``: nothing may break or stall.

A request fails where its answer is a 5xx other than 503, is no HTTP, or does not come in time. A connection that the server closes
without an answer is counted, not failed: for HTTP that is none, it is one of the right answers.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from server.bench.fuzz_requests import Call, Requests
from server.bench.server import served

KEY = "bench"
ANSWER_SECONDS = 20.0
HEALTH_SECONDS = 0.5  # the promise
HEALTH_PAUSE = 0.02
MOST_KEPT = 100  # failures that are written down
MOST_KNOWN = 200  # ids from answers that later requests name
SHOWN_BYTES = 2000
LISTENS_ON = "text/event-stream"


class Failures:
    """What went wrong, each request and answer in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self.found: list[dict[str, Any]] = []
        self.count = 0

    def add(self, call: Call, what: str, answer: bytes = b"") -> None:
        """Keep one, as long as there are few."""
        with self._lock:
            self.count += 1
            if len(self.found) == MOST_KEPT:
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / f"{len(self.found):03}.txt"
            file.write_bytes(call.shown() + b"\n\n-> " + what.encode() + b"\n" + answer[:SHOWN_BYTES])
            self.found.append(
                {
                    "kind": call.kind,
                    "request": f"{call.method} {call.target}".strip()[:200],
                    "what": what,
                    "file": str(file),
                }
            )


class Client(threading.Thread):
    """One connection's requests, one after another."""

    def __init__(self, url: str, key: str, requests: Requests, count: int, failures: Failures) -> None:
        super().__init__(daemon=True)
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), int(address.port or 80)
        self._key, self._requests, self._count, self._failures = key, requests, count, failures
        self._connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        self.statuses: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.slowest, self.sent = 0.0, 0

    def run(self) -> None:
        """Send them all."""
        for _ in range(self._count):
            call = self._requests.draw()
            began = time.monotonic()
            try:
                self._raw(call) if call.raw or call.kind == "raw" else self._whole(call)
            except TimeoutError:
                self._connection.close()
                self._failures.add(call, f"no whole answer in {ANSWER_SECONDS:g} s")
            except http.client.HTTPException as error:
                self._connection.close()
                self._closed(call, error)
            except OSError:
                self._connection.close()
                self.statuses["closed"] += 1
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.kinds[call.kind] += 1
            self.sent += 1
        self._connection.close()

    def _closed(self, call: Call, error: http.client.HTTPException) -> None:
        if isinstance(error, (http.client.RemoteDisconnected, http.client.InvalidURL)):
            self.statuses["closed"] += 1
        else:
            self._failures.add(call, f"the answer is no HTTP: {error!r}")

    def _whole(self, call: Call) -> None:
        connection = self._connection
        given = dict(call.headers)
        connection.putrequest(call.method, call.target, skip_host="Host" in given, skip_accept_encoding=True)
        for name, value in {
            "Authorization": f"Bearer {self._key}",
            "Content-Length": str(len(call.body)),
            **given,
        }.items():
            connection.putheader(name, value.encode("latin-1", "replace"))
        connection.endheaders(call.body or None)
        answer = connection.getresponse()
        if call.method == "GET" and answer.getheader("content-type", "").startswith(LISTENS_ON):
            connection.close()  # a job's events never end while nothing works on it
            self._judge(call, answer.status, b"{}")
            return
        self._judge(call, answer.status, answer.read())
        if call.target.startswith("/admin/v1/policies") and call.method == "PUT" and answer.status < 300:
            self._undo(call.target)

    def _undo(self, target: str) -> None:
        """Take an enforced name away again, which would answer all that follows with 503."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._connection.request("PUT", target, b"{}", headers)
        self._connection.getresponse().read()

    def _raw(self, call: Call) -> None:
        """Send bytes, say that no more come, and read until the end."""
        received = b""
        with socket.create_connection((self._host, self._port), timeout=ANSWER_SECONDS) as stream:
            stream.sendall(call.raw)
            stream.shutdown(socket.SHUT_WR)
            while len(received) < 2**20 and (part := stream.recv(2**16)):
                received += part
        if not received:
            self.statuses["closed"] += 1
            return
        status = received.split(b"\r\n", 1)[0].split(b" ")
        number = status[1] if len(status) > 1 and status[0].startswith(b"HTTP/1.") else b""
        if number.isdigit():
            self._judge(call, int(number), received)
        else:
            self._failures.add(call, "the answer is no HTTP", received)

    def _judge(self, call: Call, status: int, body: bytes) -> None:
        self.statuses[str(status)] += 1
        if status >= 500 and status != http.HTTPStatus.SERVICE_UNAVAILABLE:
            self._failures.add(call, str(status), body)
        elif status < 300 and len(self._requests.known) < MOST_KNOWN:
            with suppress(ValueError):
                answer = json.loads(body)
                if isinstance(answer, dict):
                    found = (answer.get(name) for name in ("id", "job_id", "takedown_id"))
                    self._requests.known += [name for name in found if isinstance(name, str)]


class Watch(threading.Thread):
    """Somebody who asks ``/health`` over and over, each time over a connection of their own."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), int(address.port or 80)
        self._over = threading.Event()
        self.seconds: list[float] = []
        self.failed = 0

    def run(self) -> None:
        """Ask until told to stop, once at least."""
        over = False
        while not over:
            began = time.monotonic()
            connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
                self.failed += answer.status != http.HTTPStatus.OK
            except (OSError, http.client.HTTPException):
                self.failed += 1
            finally:
                connection.close()
                self.seconds.append(time.monotonic() - began)
            over = self._over.wait(HEALTH_PAUSE)

    def end(self) -> dict[str, Any]:
        """Stop, and say what was seen, in seconds."""
        self._over.set()
        self.join()
        ordered = sorted(self.seconds)
        return {
            "polls": len(ordered),
            "failed": self.failed,
            "median_seconds": round(ordered[len(ordered) // 2], 4) if ordered else None,
            "slowest_seconds": round(ordered[-1], 4) if ordered else None,
            "over_the_promise": sum(seconds > HEALTH_SECONDS for seconds in ordered),
        }


def attack(
    url: str, key: str, *, requests: int, connections: int, seed: int, keep: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Send so many requests to a server; figures as the command prints them. ``sound`` is False where anything failed."""
    description, modules = _asked(url, key, "/openapi.json"), _asked(url, key, "/admin/v1/modules")
    names = [str(entry["name"]) for entry in modules["data"]]
    failures = Failures(keep)
    shares = [requests // connections + (number < requests % connections) for number in range(connections)]
    clients = [
        Client(url, key, Requests(description, names, Random(f"{seed}:{number}")), share, failures)
        for number, share in enumerate(shares)
    ]
    watch, began = Watch(url), time.monotonic()
    for thread in (watch, *clients):
        thread.start()
    told = began
    for client in clients:
        while client.is_alive():
            client.join(1.0)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                tell(f"{sum(one.sent for one in clients)} of {requests} requests, {failures.count} failed")
    health = watch.end()
    return {
        "requests": sum(client.sent for client in clients),
        "connections": connections,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "statuses": dict(sorted(sum((client.statuses for client in clients), Counter()).items())),
        "kinds": dict(sorted(sum((client.kinds for client in clients), Counter()).items())),
        "slowest_answer_seconds": round(max(client.slowest for client in clients), 3),
        "health": health,
        "failed": failures.count,
        "failures": failures.found,
        "sound": not failures.count and not health["failed"] and not health["over_the_promise"],
    }


def _asked(url: str, key: str, path: str) -> Any:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def run(
    *, requests: int, connections: int, seed: int, keep: Path, settings: dict[str, object], tell: Callable[[str], None]
) -> dict[str, Any]:
    """The same for a server of its own: a process on a free port of loopback, with short contexts and no worker."""
    with TemporaryDirectory() as folder:
        given = {
            "admin_key": KEY,
            "worker": False,
            "max_model_len": 64,
            "max_slots": 4,
            "log_level": "error",
            **settings,
        }
        with served(given, Path(folder)) as server:
            return attack(server.url, KEY, requests=requests, connections=connections, seed=seed, keep=keep, tell=tell)
