"""How long a job still takes, from what past jobs took: pure functions over their records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

NEAREST = 5


@dataclass(frozen=True)
class PastJob:
    """What a finished job tells of the next one."""

    rows: int
    seconds: Mapping[str, float]


def expected_seconds(rows: int, past: Iterable[PastJob]) -> dict[str, float]:
    """Seconds by stage: the median of the past jobs whose number of rows is nearest, by ratio."""
    near = sorted(past, key=lambda job: abs(math.log(max(job.rows, 1) / max(rows, 1))))[:NEAREST]
    stages = {stage for job in near for stage in job.seconds}
    return {stage: median([job.seconds[stage] for job in near if stage in job.seconds]) for stage in stages}


def remaining_seconds(
    expected: Mapping[str, float], done: Iterable[str], stage: str, in_stage: float, progress: float
) -> float | None:
    """Seconds left, None where no past job tells. ``in_stage`` seconds were spent on ``stage``, ``progress`` of it is done.

    Within the stage the past weighs less the more of it is done, and its own pace more.
    """
    if not expected:
        return None
    finished = set(done)
    left = sum(seconds for name, seconds in expected.items() if name not in finished and name != stage)
    if stage and stage not in finished:
        by_past = max(expected.get(stage, 0.0) - in_stage, 0.0)
        by_pace = in_stage * (1 - progress) / progress if progress > 0.05 else by_past
        left += (1 - progress) * by_past + progress * by_pace
    return left
