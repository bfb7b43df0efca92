"""A fleet under load: a rolling restart that drops nothing, and kills at random instants that lose nothing.

Nothing lost means: every takedown's job ends with one module, whose file is whole in the store; no request runs without a module
or guard that it must have; the audit trail holds.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from server.bench.fleet.clients import Administrator, Journal, Load
from server.bench.fleet.fleet import ADMIN_KEY, READY_SECONDS, Fleet
from server.bench.fleet.parts import Part, answers, wait_for
from server.registry.tables import JobState, ModuleState
from unbind_core.errors import UnbindError
from unbind_core.progress import Progress, ProgressCallback

KINDS = ("server", "worker", "stages", "registry", "silence", "store")
AGAIN_SECONDS = 900.0  # a start is refused while the registry is away, and the registry may be killed during each
PAUSE_SECONDS = 2.0  # at most, between a kill and the start after it


def rolling_restart(fleet: Fleet, clients: int = 3) -> dict[str, Any]:
    """One server after the other is ended in good order and started again, while clients complete."""
    journal, seconds = Journal(), []
    with Load(fleet, journal, clients):
        time.sleep(1.0)
        for part, port in zip(fleet.servers, fleet.ports, strict=True):
            began = time.monotonic()
            part.signal(signal.SIGTERM)
            part.wait()
            part.start()
            wait_for(lambda: answers(port), part, READY_SECONDS)  # noqa: B023 - called here
            seconds.append(round(time.monotonic() - began, 2))
        time.sleep(1.0)
    dropped = Counter(str(answer.status) for answer in journal.answers if not answer.whole)
    return {
        "requests": len(journal.answers),
        "dropped": dropped.total(),
        "by_status": dict(dropped),
        "seconds": seconds,
    }


class Killer:
    """Ends parts at random instants and has them started again, each by a thread of its own, as a service manager would."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._random = fleet, random.Random(seed)
        self.ready_again: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._mending: list[threading.Thread] = []
        self.failed: BaseException | None = None
        self._busy: set[str] = set()

    def strike(self, kind: str) -> bool:
        """Kill one of a kind; whether there was one to kill."""
        fleet = self._fleet
        if kind in ("server", "worker"):
            pairs = list(zip(fleet.servers, fleet.ports, strict=True)) if kind == "server" else None
            part = self._random.choice([p for p in (fleet.servers if pairs else fleet.workers) if p.running] or [None])
            if part is None or part.name in self._busy:
                return False
            ready = self._server_ready(part) if pairs else self._worker_ready(part)
            self._mend(kind, part.name, part.kill, part.start, ready)
        elif kind == "stages":
            return self._kill_child()
        elif kind in ("registry", "silence"):
            if "registry" in self._busy:
                return False
            by = (
                (fleet.kill_database, fleet.start_database)
                if kind == "registry"
                else (fleet.freeze_database, fleet.thaw_database)
            )
            self._mend(kind, "registry", *by, self._all_ready)
        elif "store" in self._busy or fleet.store is None:
            return False
        else:
            store = fleet.store.part
            freeze, thaw = (lambda: store.signal(signal.SIGSTOP)), (lambda: store.signal(signal.SIGCONT))
            self._mend(kind, kind, freeze, thaw, self._all_ready)
        return True

    def wait(self) -> None:
        """Until all is mended. Raises what failed."""
        for thread in self._mending:
            thread.join(AGAIN_SECONDS + 30)
        if self.failed is not None:
            raise self.failed

    def _mend(
        self, kind: str, name: str, kill: Callable[[], None], start: Callable[[], None], ready: Callable[[], None]
    ) -> None:
        pause = self._random.random() * PAUSE_SECONDS
        self._busy.add(name)
        kill()

        def run() -> None:
            try:
                time.sleep(pause)
                began = time.monotonic()
                start()
                ready()
                self.ready_again[kind].append(round(time.monotonic() - began, 2))
            except BaseException as error:  # noqa: BLE001 - told by ``wait``
                self.failed = error
            finally:
                self._busy.discard(name)

        thread = threading.Thread(target=run, daemon=True)
        self._mending.append(thread)
        thread.start()

    def _server_ready(self, part: Part) -> Callable[[], None]:
        port = self._fleet.ports[self._fleet.servers.index(part)]

        def ready() -> None:
            deadline = time.monotonic() + AGAIN_SECONDS
            while not answers(port):
                if not part.running:  # a start is refused while the registry is away
                    part.start()
                if time.monotonic() > deadline:
                    raise UnbindError(f"{part.name} is not ready again: {part.told}")
                time.sleep(0.1)

        return ready

    def _worker_ready(self, part: Part) -> Callable[[], None]:
        said = part.log.read_text(errors="replace").count("waits for takedowns")

        def ready() -> None:
            deadline = time.monotonic() + AGAIN_SECONDS
            while part.log.read_text(errors="replace").count("waits for takedowns") <= said:
                if not part.running:
                    part.start()
                if time.monotonic() > deadline:
                    raise UnbindError(f"{part.name} is not ready again: {part.told}")
                time.sleep(0.1)

        return ready

    def _all_ready(self) -> None:
        for part in self._fleet.servers:
            deadline, port = time.monotonic() + AGAIN_SECONDS, self._fleet.ports[self._fleet.servers.index(part)]
            while part.running and part.name not in self._busy and not answers(port, key=ADMIN_KEY):
                if time.monotonic() > deadline:
                    raise UnbindError(f"{part.name} does not see registry and store again: {part.told}")
                time.sleep(0.1)

    def _kill_child(self) -> bool:
        found: list[int] = []
        for part in self._fleet.workers:
            if part.running:
                with suppress(OSError):
                    tasks = list(Path(f"/proc/{part.pid}/task").iterdir())
                    found += [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        if not found:
            return False
        with suppress(ProcessLookupError):
            os.kill(self._random.choice(found), signal.SIGKILL)
        return True


def kills(
    fleet: Fleet, count: int, *, seed: int, clients: int, pause: float, progress: ProgressCallback
) -> dict[str, Any]:
    """``count`` kills, ``pause`` seconds apart on average, under clients and an administrator."""
    journal, killer, done = Journal(), Killer(fleet, seed), Counter[str]()
    rng, began = random.Random(seed + 1), time.monotonic()
    kinds = [kind for kind in KINDS if kind != "store" or fleet.store is not None]
    with Load(fleet, journal, clients), Administrator(fleet, journal) as administrator:
        turn: list[str] = []
        while done.total() < count:
            time.sleep(rng.expovariate(1 / pause))
            if administrator.failed is not None or killer.failed is not None:
                break
            turn = turn or rng.sample(kinds, len(kinds))  # each kind as often as any other
            if killer.strike(turn[-1]):
                done[turn.pop()] += 1
            else:
                turn.insert(0, turn.pop())
            progress(Progress("kills", done.total(), count))
        killer.wait()
        time.sleep(2.0)
    if administrator.failed is not None:
        raise administrator.failed
    statuses = Counter(str(answer.status) if answer.whole else f"{answer.status} broken" for answer in journal.answers)
    return {
        "seed": seed,
        "kills": dict(done),
        "seconds": round(time.monotonic() - began, 1),
        "requests": len(journal.answers),
        "by_status": dict(statuses),
        **journal.judged(fleet.outages),
        "ready_again_seconds": {
            kind: {"median": statistics.median(found), "worst": max(found)}
            for kind, found in killer.ready_again.items()
            if found
        },
        **left(fleet, journal),
    }


def left(fleet: Fleet, journal: Journal) -> dict[str, Any]:
    """What is wrong with what the registry and the store hold after all; empty lists where nothing is."""
    jobs = {job_id: fleet.registry.jobs.get(job_id, time.time()) for job_id in journal.takedowns}
    records = fleet.registry.modules.versions()
    made = Counter(record["job_id"] for record in records if record["kind"] == "module")
    lost = [job_id for job_id, job in jobs.items() if job["state"] != JobState.SUCCEEDED or made[job_id] != 1]
    damaged = []
    for record in records:
        if record["state"] in (ModuleState.ACTIVE, ModuleState.SUSPENDED):
            try:
                whole = hashlib.sha256(fleet.object(record["file"])).hexdigest() == record["digest"]
            except OSError:
                whole = False
            damaged += [] if whole else [record["id"]]
    unknown = sorted(set(made) - set(jobs))
    return {
        "jobs": len(jobs),
        "lost": lost,
        "twice_or_unknown": unknown,
        "damaged": damaged,
        "audit": fleet.registry.audit_problems(),
    }
