"""A registry and workers with fast stages on it: what tests of workers are made in."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.registry.audit import Actor
from server.registry.registry import Registry, open_registry
from server.registry.tables import ENDED
from server.settings import PREFIX, Settings
from server.worker.process import environment_of, python
from tests.support.folders import files_in, unfinished_in
from tests.support.repository import ROOT

ADMIN = Actor("admin", "test")
LEASE = 1.5


class Workshop:
    """A registry, and workers with fast stages on it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        given = {"lease_seconds": LEASE, "max_attempts": 10_000, "prepare": False, "worker_nice": 0, **settings}
        self.settings = Settings(data_dir=folder / "data", **given)
        self.registry: Registry = open_registry(self.settings)
        self.workers: list[subprocess.Popen[str]] = []
        self.log: list[str] = []

    def start(self, **environment: str) -> subprocess.Popen[str]:
        """A worker process."""
        process = subprocess.Popen(
            python("tests.support.fast_stages", "worker"),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment_of(self.settings), "PYTHONPATH": str(ROOT), **environment},
        )
        threading.Thread(target=lambda: self.log.extend(process.stderr or ()), daemon=True).start()
        self.workers.append(process)
        return process

    def submit(self, name: str, forget_digest: str = "f", **options: Any) -> str:
        """A job."""
        job, _ = self.registry.takedowns.submit(
            name=name,
            row_count=3,
            forget_digest=forget_digest,
            notice={},
            options=options,
            request_digest="r",
            idempotency_key=None,
            fingerprint="model",
            actor=ADMIN,
            now=time.time(),
        )
        return str(job["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """One job."""
        return self.registry.jobs.get(job_id, time.time())

    def wait(self, what: Callable[[], bool], seconds: float = 30) -> None:
        """Until something is so."""
        deadline = time.monotonic() + seconds
        while not what():
            told = "".join(self.log[-30:])
            assert time.monotonic() < deadline, told
            assert not any((worker.poll() or 0) > 0 for worker in self.workers), (
                told
            )  # none ends by an error of its own
            time.sleep(0.02)

    def ended(self, *jobs: str, seconds: float = 30) -> list[dict[str, Any]]:
        """The jobs once they have ended."""
        self.wait(lambda: all(self.job(job)["state"] in ENDED for job in jobs), seconds)
        return [self.job(job) for job in jobs]

    def children(self) -> list[int]:
        """Process ids of the stages' processes of this workshop's workers, dead workers' included."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            mine = f"{PREFIX}DATA_DIR={self.settings.data_dir}".encode() in environment.split(b"\0")
            if mine and b"tests.support.fast_stages" in command and b"worker" not in command and state != "Z":
                found.append(int(entry.name))
        return found

    def check_what_is_left(self, jobs: list[str]) -> None:
        """One module a job, each file whole and known, no temporary file, a whole audit trail."""
        records = self.registry.modules.versions()
        assert sorted(record["job_id"] for record in records) == sorted(jobs)
        store = Path(self.settings.published_store)
        files = sorted(path.name for path in files_in(store))
        assert files == sorted(f"{record['digest']}.safetensors" for record in records)
        left = [path for path in unfinished_in(self.settings.data_dir) if "jobs" not in path.parts]
        assert not left  # a job's own folder is tidied when it ends
        assert self.registry.audit_problems() == []
        ends = [row["subject"] for row in self.registry.audit(limit=1000) if row["action"] == "job.succeeded"]
        assert sorted(ends) == sorted(jobs)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.terminate()
        for worker in self.workers:
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.wait(lambda: not self.children(), 5)
        for worker in self.workers:
            if worker.stderr is not None:
                worker.stderr.close()
        self.registry.close()


@contextmanager
def workshop(folder: Path, **settings: Any) -> Iterator[Workshop]:
    """One in a folder of its own; its workers end with it."""
    made = Workshop(folder, **settings)
    try:
        yield made
    finally:
        made.close()
