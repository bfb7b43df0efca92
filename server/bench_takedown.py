"""How long a takedown takes on a running service, and what that costs the streams it serves meanwhile.

A real server on loopback with the demo model. A first takedown, not counted, leaves the retain statistics in the cache; then the
inter-token time of the streams is measured alone, and again from the POST of the second takedown until its module is in force.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

from server.settings import PREFIX

KEY = "bench"
STREAM_TOKENS = 64
TIMEOUT_SECONDS = 1800.0


def measure_takedown(
    rows: list[dict[str, str]], warm: list[dict[str, str]], prompts: list[str], streams: int, quiet: float,
    tell: Callable[[str], None], settings: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Seconds from POST to a module in force, by stage, and the streams' median inter-token time before and during."""
    with TemporaryDirectory() as folder, _serving(Path(folder), settings) as url:
        tell("first takedown (fills the cache)")
        _wait(url, _post(url, "warm", warm), tell)
        with _Streams(url, prompts, streams) as load:
            tell(f"{streams} streams alone, {quiet:g} s")
            time.sleep(min(quiet / 2, 3.0))
            load.clear()
            time.sleep(quiet)
            alone = load.clear()
            tell(f"takedown of {len(rows)} rows beside {streams} streams")
            began = time.monotonic()
            job = _wait(url, _post(url, "measured", rows), tell)
            seconds = time.monotonic() - began
            beside = load.clear()
            failed = load.failed
    return {
        "rows": len(rows), "streams": streams, "outcome": job["outcome"], "seconds": round(seconds, 2),
        "stages": job["timings"], "fit": (job["result"] or {}).get("fit", {}).get("seconds"),
        "inter_token_ms": {"alone": _milliseconds(alone), "beside": _milliseconds(beside)},
        "rise": round(median(beside) / median(alone) - 1, 3) if alone and beside else None, "failed_requests": failed,
    }  # fmt: skip


def _milliseconds(gaps: list[float]) -> float | None:
    return round(1000 * median(gaps), 2) if gaps else None


@contextmanager
def _serving(folder: Path, settings: dict[str, str]) -> Iterator[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    given = {"ADMIN_KEY": KEY, "PORT": "0", "DATA_DIR": str(folder / "data"), "MODULES_DIR": str(folder / "none"),
             "LOG_LEVEL": "warning", **{name.upper(): value for name, value in settings.items()}}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "server", "serve", "--json"], stdout=subprocess.PIPE, text=True,
        env={**environment, **{PREFIX + name: value for name, value in given.items()}},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        announced = ""
        while not announced.endswith("}\n"):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the server did not start; its log says why")
            announced += line
        yield str(json.loads(announced)["url"])
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def _call(url: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body is not None else None
    with urlopen(Request(url + path, data=data, headers=headers), timeout=120) as answer:  # noqa: S310 - our own server
        return json.loads(answer.read())


def _post(url: str, name: str, rows: list[dict[str, str]]) -> str:
    return str(_call(url, "/admin/v1/takedowns", {"name": name, "rows": rows})["job_id"])


def _wait(url: str, job_id: str, tell: Callable[[str], None]) -> dict[str, Any]:
    deadline, stage = time.monotonic() + TIMEOUT_SECONDS, ""
    while time.monotonic() < deadline:
        job: dict[str, Any] = _call(url, f"/admin/v1/jobs/{job_id}")
        if job["state"] in ("succeeded", "failed", "cancelled"):
            return job
        if job["stage"] != stage:
            stage = job["stage"]
            tell(f"  {stage}")
        time.sleep(0.1)
    raise RuntimeError(f"job {job_id} did not end in {TIMEOUT_SECONDS:g} s")


class _Streams:
    """Clients that stream one completion after another until the end, and keep the time between pieces."""

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
        """The gaps since the last call, in seconds."""
        kept, self._gaps = self._gaps, []
        return kept

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            prompt = self._prompts[number % len(self._prompts)]
            number += len(self._threads)
            body = {"prompt": prompt, "max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
            request = Request(  # noqa: S310 - our own server
                f"{self._url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                with urlopen(request, timeout=120) as answer:  # noqa: S310
                    last, ended = 0.0, False
                    for line in answer:
                        if line.startswith(b"data: [DONE]"):
                            ended = True
                        elif line.startswith(b"data: "):
                            now = time.monotonic()
                            if last:
                                self._gaps.append(now - last)
                            last = now
                self.failed += not ended
            except OSError:
                self.failed += 1
