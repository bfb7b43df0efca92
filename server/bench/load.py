"""What a probe and a scrape wait for while many clients stream: the part ``load`` of ``unbind bench serve``."""

from __future__ import annotations

import http.client
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from server.bench.server import served
from server.bench.systems import HttpSystem, Prompts
from unbind_core.progress import Progress, ProgressCallback

PROBED = ("/health", "/ready", "/metrics")
PAUSE_SECONDS = 0.05


def under_load(settings: dict[str, object], prompts: Prompts, new: int, progress: ProgressCallback) -> dict[str, Any]:
    """Seconds to answer by path, median and worst, while a client streams for each prompt, under all modules
    that are loaded; and their tokens a second."""
    clients = len(prompts)
    sizes = {
        "max_slots": clients,
        "max_model_len": max(map(len, prompts)) + new,
        "threads": torch.get_num_threads(),
        "worker": False,
        "when_open": "allow",  # else answers would end where their gates open
    }
    waited: dict[str, list[float]] = {path: [] for path in PROBED}
    with (
        tempfile.TemporaryDirectory() as folder,
        served(settings | sizes, Path(folder)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        begun = time.perf_counter()
        streams = pool.submit(HttpSystem(server.url, every_module=True).generate, prompts, new, [0.0] * clients)
        while not streams.done():
            for path, seconds in waited.items():
                seconds.append(answered(server.url, path))
            progress(Progress("probes", len(waited["/health"]), 0))
            time.sleep(PAUSE_SECONDS)
        streams.result()
        spent = time.perf_counter() - begun
    return {
        "tokens_per_second": clients * new / spent,
        "probes": len(waited["/health"]),
        "median_seconds": {path: statistics.median(seconds) for path, seconds in waited.items()},
        "worst_seconds": {path: max(seconds) for path, seconds in waited.items()},
    }


def answered(url: str, path: str) -> float:
    """Seconds until a new connection has its answer, as a probe's and a scraper's are new."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=60)
    try:
        connection.request("GET", path)
        connection.getresponse().read()
    finally:
        connection.close()
    return time.perf_counter() - begun
