"""Clients of a fleet, which reach it through the proxy alone: those that complete all the time, and one that administers."""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server.bench.fleet.fleet import ADMIN_KEY, Fleet
from unbind_core.errors import UnbindError

HOLDS_SECONDS = 2.0  # what the service promises: how long a change takes to hold at every server
ANSWER_SECONDS = 60.0
INSIST_SECONDS = 300.0
PAUSE_SECONDS = 0.05  # of a client, between two calls
LIVE = 2  # takedowns that are not suspended again yet
ROW = "def held_{0}(items):\n    total_{0} = {0}\n    for item in items:\n        total_{0} += item.size\n    return total_{0}\n"


@dataclass(frozen=True)
class Answer:
    """One request: when it was sent and its head came back (monotonic), its status (0: broken off), and what it ran under.

    ``whole``: whether it came to its end.
    """

    sent: float
    headed: float
    status: int
    applied: frozenset[str]
    whole: bool


@dataclass
class Demand:
    """A name that must apply from ``since`` on, as somebody was told then, until ``leaving``; gone from ``gone`` on."""

    name: str
    since: float
    leaving: float = float("inf")
    gone: float = float("inf")


@dataclass
class Journal:
    """What was answered and what was demanded."""

    answers: list[Answer] = field(default_factory=list)
    demands: list[Demand] = field(default_factory=list)
    takedowns: list[str] = field(default_factory=list)  # the jobs

    def judged(self, outages: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """Requests that ran without what they had to, and how late changes held: seconds beyond the moment at which every server
        could know. While the registry is away nobody can.
        """
        late, slow = 0.0, 0.0
        for demand in self.demands:
            holds, gone = known(demand.since, outages), known(demand.gone, outages)
            for answer in self.answers:
                if answer.status != 200:
                    continue
                if answer.headed < demand.leaving and demand.name not in answer.applied:
                    late = max(late, answer.sent - holds)
                if answer.sent > gone and demand.name in answer.applied:
                    slow = max(slow, answer.sent - gone)
        return {"demands": len(self.demands), "holds_seconds": round(late, 2), "suspended_seconds": round(slow, 2)}


def known(told: float, outages: Sequence[tuple[float, float]]) -> float:
    """When servers could know of a change: when it was made, or after an outage that came before they had looked."""
    for begun, over in sorted(outages):
        if begun - HOLDS_SECONDS < told < over:
            told = over
    return told


class Load:
    """Clients that complete, every other one as a stream, until they are stopped."""

    def __init__(self, fleet: Fleet, journal: Journal, clients: int) -> None:
        self._port, self._journal = fleet.port, journal
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS + 5)

    def _run(self, number: int) -> None:
        asked = number
        while not self._stop.wait(PAUSE_SECONDS):
            asked += 1
            self._journal.answers.append(complete(self._port, f"def add_{asked}(", stream=asked % 2 == 0))


def complete(port: int, prompt: str, *, stream: bool) -> Answer:
    """One completion through the proxy."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": stream, "ignore_eos": True}
    sent = headed = time.monotonic()
    status, applied = 0, frozenset[str]()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        headed, status = time.monotonic(), answer.status
        labels = answer.getheader("X-Unbind-Modules") or ""
        applied = frozenset(label.partition("@")[0] for label in labels.replace(" ", "").split(",") if label)
        text = answer.read()
        whole = text.rstrip().endswith(b"data: [DONE]") if stream else True
    except (OSError, http.client.HTTPException):
        return Answer(sent, headed, 0, applied, whole=False)
    finally:
        connection.close()
    return Answer(sent, headed, status, applied, status == 200 and whole)


class Administrator:
    """Takes code down and suspends what it took down before, again and again; tries again what it has no answer to."""

    def __init__(self, fleet: Fleet, journal: Journal) -> None:
        self._port, self._journal = fleet.port, journal
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failed: BaseException | None = None

    def __enter__(self) -> Administrator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(INSIST_SECONDS)

    def _run(self) -> None:
        held: list[tuple[Demand, Demand]] = []
        try:
            while not self._stop.is_set():
                held.append(self._take_down(len(self._journal.takedowns)))
                if len(held) > LIVE:
                    for demand in held.pop(0):
                        self._suspend(demand)
        except BaseException as error:  # noqa: BLE001 - told when the run is over
            self.failed = error

    def _take_down(self, number: int) -> tuple[Demand, Demand]:
        """Guard first, module when it is made."""
        body = {
            "name": f"t{number}",
            "rows": [{"text": ROW.format(number)}],
            "options": {"scope": "global", "override": True, "guard": {"run": 10}},
        }
        _, answer = self._ask("POST", "/takedowns", body, {"Idempotency-Key": uuid.uuid4().hex}, (202,))
        guard = Demand(f"t{number}:guard", time.monotonic())
        self._journal.demands.append(guard)
        self._journal.takedowns.append(str(answer["job_id"]))
        while True:
            _, job = self._ask("GET", f"/jobs/{answer['job_id']}", None, {}, (200,))
            if job["state"] in ("succeeded", "failed", "cancelled"):
                break
            time.sleep(0.2)
        if job["outcome"] != "active":
            raise UnbindError(f"job {job['id']} ended as {job['state']}, {job['outcome']}: {job['error']}")
        module = Demand(f"t{number}", time.monotonic())
        self._journal.demands.append(module)
        return guard, module

    def _suspend(self, demand: Demand) -> None:
        name, _, guard = demand.name.partition(":")
        demand.leaving = time.monotonic()
        reference = f"guard:{name}" if guard else name
        # 409: done already, by a try whose answer was lost
        status, answer = self._ask("POST", f"/modules/{reference}/suspend", {}, {"If-Match": "*"}, (200, 202, 409))
        if status == 409 and "suspended" not in answer["error"]["message"]:
            raise UnbindError(str(answer))
        demand.gone = time.monotonic()

    def _ask(
        self, method: str, path: str, body: object, headers: dict[str, str], wanted: tuple[int, ...]
    ) -> tuple[int, Any]:
        given = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json", **headers}
        deadline, said = time.monotonic() + INSIST_SECONDS, ""
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
            try:
                sent = None if body is None else json.dumps(body)
                connection.request(method, f"/admin/v1{path}", sent, given)
                answer = connection.getresponse()
                status, said = answer.status, answer.read().decode(errors="replace")
                if status in wanted:
                    return status, json.loads(said)
                if status < 500:
                    raise UnbindError(f"{method} {path}: {status} {said}")
            except (OSError, http.client.HTTPException) as error:
                said = str(error)
            finally:
                connection.close()
            time.sleep(0.3)
        raise UnbindError(f"{method} {path}: no answer in {INSIST_SECONDS:g} s: {said}")
