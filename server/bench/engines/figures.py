"""All parts together, one after another."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from server.bench.engines.equality import equal, isolation
from server.bench.engines.kills import killed
from server.bench.engines.plugin import SHAPE, plugin, saved
from server.bench.engines.speed import workloads
from server.bench.engines.subject import Subject
from server.bench.serve import WORKLOADS, Workload
from unbind_core.progress import ProgressCallback

PARTS = ("equal", "isolation", "plugin", "workloads", "kills")


def run(
    subject: Subject,
    *,
    requests: int,
    pairs: int,
    repeats: int,
    kills: int,
    seed: int,
    parts: Sequence[str] = PARTS,
    progress: ProgressCallback,
) -> dict[str, Any]:
    """All figures by part; ``version`` is vLLM's."""
    figures: dict[str, Any] = {"version": importlib.import_module("vllm").__version__}
    if "equal" in parts:
        figures |= equal(subject, requests, progress)
    if "isolation" in parts:
        figures["isolation"] = isolation(subject, pairs, progress)
    if "plugin" in parts:
        with saved(subject) as plain:
            figures |= plugin(plain, [SHAPE], repeats, progress)
    if "workloads" in parts:
        figures |= workloads(subject, [Workload.parse(text) for text in WORKLOADS], repeats, progress)
    if "kills" in parts:
        figures["killed"] = killed(subject, kills, seed, progress)
    return figures
