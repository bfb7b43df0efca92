"""How long a takedown takes on a running service, and what that costs the streams it serves meanwhile.

A real server on loopback with the demo model. A first takedown, posted as soon as it answers, leaves the retain statistics in the
cache; then the streams are measured alone, and again from the POST of the second takedown until its module is active.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from server.bench.server import served

KEY = "bench"
STREAM_TOKENS = 64
JOB_SECONDS = 1800.0
TIMEOUT_SECONDS = 120.0


def measure_takedown(
    rows: list[dict[str, str]],
    first: list[dict[str, str]],
    prompts: list[str],
    streams: int,
    quiet: float,
    tell: Callable[[str], None],
    settings: dict[str, str],
) -> dict[str, Any]:
    """Seconds from POST to an active module, by stage: of the first takedown, cold and alone; of the second, beside streams,
    with the mean time between their tokens before and during it.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        given = {"admin_key": KEY, "modules_dir": folder / "none", "log_level": "warning", **settings}
        # One client: each new one reads the system's certificates, which would slow the streams.
        with (
            served(given, folder) as server,
            httpx2.Client(base_url=server.url, timeout=TIMEOUT_SECONDS) as client,
        ):
            client.headers["Authorization"] = f"Bearer {KEY}"
            tell("first takedown, nothing cached")
            cold = _takedown(client, "first", first, tell)
            with _Streams(server.url, prompts, streams) as load:
                tell(f"{streams} streams alone, {quiet:g} s")
                time.sleep(min(quiet / 2, 3.0))
                load.clear()
                time.sleep(quiet)
                alone = load.clear()
                tell(f"takedown of {len(rows)} rows beside {streams} streams")
                warm = _takedown(client, "second", rows, tell)
                beside = load.clear()
                failed = load.failed
    return {
        **warm,
        "streams": streams,
        "inter_token_ms": {"alone": _milliseconds(alone), "beside": _milliseconds(beside)},
        "rise": round(median(beside) / median(alone) - 1, 3) if alone and beside else None,
        "failed_requests": failed,
        "cold": cold,
    }


def _takedown(
    client: httpx2.Client, name: str, rows: list[dict[str, str]], tell: Callable[[str], None]
) -> dict[str, Any]:
    began = time.monotonic()
    job = _wait(client, _post(client, name, rows), tell)
    return {
        "rows": len(rows),
        "outcome": job["outcome"],
        "seconds": round(time.monotonic() - began, 2),
        "stages": job["timings"],
        "fit": (job["result"] or {}).get("fit", {}).get("seconds"),
    }


def _milliseconds(gaps: list[float]) -> float | None:
    return round(1000 * median(gaps), 2) if gaps else None


def _post(client: httpx2.Client, name: str, rows: list[dict[str, str]]) -> str:
    answer = client.post("/admin/v1/takedowns", json={"name": name, "rows": rows})
    return str(answer.raise_for_status().json()["job_id"])


def _wait(client: httpx2.Client, job_id: str, tell: Callable[[str], None]) -> dict[str, Any]:
    deadline, stage = time.monotonic() + JOB_SECONDS, ""
    while time.monotonic() < deadline:
        job: dict[str, Any] = client.get(f"/admin/v1/jobs/{job_id}").raise_for_status().json()
        if job["state"] in ("succeeded", "failed", "cancelled"):
            return job
        if job["stage"] != stage:
            stage = job["stage"]
            tell(f"  {stage}")
        time.sleep(0.1)
    raise RuntimeError(f"job {job_id} did not end in {JOB_SECONDS:g} s")


class _Streams:
    """Clients that stream one completion after another until the end, and keep the mean time between tokens of each."""

    def __init__(self, url: str, prompts: list[str], count: int) -> None:
        self._url, self._prompts = url, prompts
        self._gaps: list[float] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]
        self.failed = 0

    def __enter__(self) -> _Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def clear(self) -> list[float]:
        """One figure for each completion since the last call, in seconds."""
        kept, self._gaps = self._gaps, []
        return kept

    def _run(self, number: int) -> None:
        with httpx2.Client(base_url=self._url, timeout=TIMEOUT_SECONDS) as client:
            while not self._over.is_set():
                prompt = self._prompts[number % len(self._prompts)]
                number += len(self._threads)
                seconds = _streamed(client, prompt)
                if seconds is None:
                    self.failed += 1
                else:
                    self._gaps.append(seconds / (STREAM_TOKENS - 1))  # an event may hold a few tokens


def _streamed(client: httpx2.Client, prompt: str) -> float | None:
    """Seconds from the first to the last token of one completion; None where it failed."""
    body = {"prompt": prompt, "max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    first = last = 0.0
    try:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.raise_for_status().iter_lines():
                if line.startswith("data: [DONE]"):
                    return last - first
                if line.startswith("data: "):
                    last = time.monotonic()
                    first = first or last
    except httpx2.HTTPError:
        pass
    return None
