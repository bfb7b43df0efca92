"""Whole processes: a real ``unbind serve`` over a tiny checkpoint, on loopback, ended by its process id."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from server.bench.server import Served, served
from tests.core.conftest import CORPUS, save_checkpoint
from tests.support.databases import PROGRAMS
from tests.support.disks import Disk, small_disk
from tests.system.workshop import Workshop, workshop

ROOT = Path(__file__).resolve().parents[2]
ADMIN_KEY = "test-admin-key"

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


class ServerProcess:
    """A running server and how to talk to it."""

    def __init__(self, running: Served, data_dir: Path, log: Path) -> None:
        self.process, self.url, self.data_dir, self._log = running.process, running.url, data_dir, log

    @property
    def log(self) -> list[str]:
        """The lines of its log up to now."""
        return self._log.read_text().splitlines(keepends=True)

    def call(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> Any:
        """Status, parsed body and headers (names in lower case) of one JSON call."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json", **(headers or {})}
        )
        try:
            with urlopen(request, timeout=60) as answer:
                return answer.status, _parsed(answer.read()), _lower(answer.headers)
        except HTTPError as error:
            with error:
                return error.code, _parsed(error.read()), _lower(error.headers)

    def admin(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> Any:
        """Status and parsed body of an admin call."""
        key = {"Authorization": f"Bearer {ADMIN_KEY}"}
        status, answer, _ = self.call("/admin/v1" + path, body, {**key, **(headers or {})}, method)
        return status, answer

    def complete(self, prompt: str, **fields: Any) -> str:
        """Greedy text of one completion."""
        status, answer, _ = self.call("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def wait_for_job(self, job_id: str, seconds: float = 900) -> dict[str, Any]:
        """The job when it has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            _, job = self.admin(f"/jobs/{job_id}")
            if job["state"] in ("succeeded", "failed", "cancelled"):
                return dict(job)
            time.sleep(0.2)
        raise AssertionError(f"job {job_id} did not end in {seconds} s: {job}\n{''.join(self.log[-40:])}")

    def worker_pids(self) -> list[int]:
        """Process ids of the server's own children."""
        return sorted(child.pid for child in psutil.Process(self.process.pid).children())


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def pytest_report_header() -> list[str]:
    """Say whether the page at ``/`` is tried in a browser, and several servers behind a proxy."""
    missing = [] if PROGRAMS else ["PostgreSQL (Debian: apt-get install postgresql)"]
    missing += [] if NGINX else ["nginx (Debian: apt-get install nginx-light)"]
    return [
        f"console tests: {CHROMIUM or 'left out, there is no browser (Debian: apt-get install chromium)'}",
        f"fleet tests: {f'left out, there is no {chr(32).join(missing)}' if missing else NGINX}",
    ]


@contextmanager
def serving(model: Path, folder: Path, *, cwd: Path = ROOT, **settings: Any) -> Iterator[ServerProcess]:
    """``unbind serve`` with its own data folder, in the folder ``cwd``; ended, worker included, on leaving."""
    (folder / "modules").mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {
        "model": model,
        "admin_key": ADMIN_KEY,
        "data_dir": folder / "data",
        "modules_dir": folder / "modules",
        "worker_nice": 0,
        "worker_threads": 1,
        "max_model_len": 512,
        "log_level": "info",
        **settings,
    }
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = folder / "server.log"
    with served(given, folder, cwd=cwd, environment=environment, log=log) as running:
        yield ServerProcess(running, given["data_dir"], log)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 checkpoint."""
    return save_checkpoint("qwen2", tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def retain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Retain rows enough for a fit."""
    path = tmp_path_factory.mktemp("rows") / "retain.jsonl"
    rows = [
        {"text": text.replace("first", f"value_{i}").replace("index", f"i{i}")} for i in range(8) for text in CORPUS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk that can be filled."""
    with small_disk(tmp_path / "disk") as made:
        yield made


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Workshop]:
    with workshop(tmp_path) as made:
        yield made
