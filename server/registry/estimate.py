"""How long a job still takes, from what past jobs took: pure functions over their records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

NEAREST = 5


@dataclass(frozen=True)
class PastJob:
    """What a finished job tells of the next one."""

    rows: int
    seconds: Mapping[str, float]


def near_seconds(rows: int, past: Iterable[PastJob]) -> dict[str, list[float]]:
    """Seconds by stage of the past jobs whose number of rows is nearest, by ratio."""
    near = sorted(past, key=lambda job: abs(math.log(max(job.rows, 1) / max(rows, 1))))[:NEAREST]
    stages = {stage for job in near for stage in job.seconds}
    return {stage: [job.seconds[stage] for job in near if stage in job.seconds] for stage in stages}


def expected_seconds(near: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Seconds by stage: the medians of the past jobs."""
    return {stage: median(seconds) for stage, seconds in near.items()}


def remaining_seconds(
    near: Mapping[str, Sequence[float]], done: Iterable[str], stage: str, in_stage: float
) -> float | None:
    """Seconds left after ``in_stage`` seconds of ``stage``; None where no past job tells.

    A stage that lasts longer than half of the past jobs' goes by those that were longer still. Where none was, nobody knows: how
    far a search is says nothing of how long it goes on.
    """
    if not near:
        return None
    finished = {*done}
    left = sum(median(seconds) for name, seconds in near.items() if name not in finished and name != stage)
    if stage and stage not in finished:
        seconds = near.get(stage, ())
        longer = seconds if seconds and in_stage < median(seconds) else [past for past in seconds if past > in_stage]
        if not longer:
            return None
        left += median(longer) - in_stage
    return left
