"""How long a job still takes, from what past jobs took; how the queue stands, and whose worker is silent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from server.registry.tables import Job, JobState, Takedown
from server.registry.transactions import Transactions

NEAREST = 5
REMEMBERED = 50  # past jobs that estimates look at


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


def past_jobs(session: Session, kind: str) -> list[PastJob]:
    """The newest jobs of this kind that made a module or were about one; a quick look tells nothing of a whole fit."""
    finished = (
        select(Job.stages, Takedown.options, Takedown.row_count)
        .join(Takedown, Takedown.id == Job.takedown_id)
        .where(Job.state == JobState.SUCCEEDED, Job.kind == kind, Job.module_id.is_not(None))
        .order_by(Job.finished_at.desc())
        .limit(REMEMBERED)
    )
    return [
        PastJob(rows, {stage: done["seconds"] for stage, done in stages.items()})
        for stages, options, rows in session.execute(finished)
        if options.get("effort", 1.0) == 1.0
    ]


def near_job(session: Session, job: Job) -> dict[str, list[float]]:
    """``near_seconds`` for this job."""
    takedown = session.get(Takedown, job.takedown_id) if job.takedown_id else None
    return near_seconds(takedown.row_count, past_jobs(session, job.kind)) if takedown else {}


@dataclass(frozen=True)
class Standing:
    """Jobs by state; seconds that the oldest queued one has waited, and that the most silent worker of a running one has said
    nothing: 0 without such a job.
    """

    states: Mapping[str, int]
    waited: float
    silent: float


def standing(transactions: Transactions, now: float, lease: float) -> Standing:
    """How the queue stands; ``lease``: seconds that workers ask for at each sign of life."""
    since = case((Job.lease_expires > Job.created_at, Job.lease_expires), else_=Job.created_at)  # later: it came back
    wanted = select(Job.state, func.count(), func.min(since), func.min(Job.lease_expires)).group_by(Job.state)
    with transactions.look() as session:
        found = {state: (count, first, expires) for state, count, first, expires in session.execute(wanted)}
    waited = now - found[JobState.QUEUED][1] if JobState.QUEUED in found else 0.0
    silent = now - (found[JobState.RUNNING][2] - lease) if JobState.RUNNING in found else 0.0
    states = {str(state): int(found[state][0]) if state in found else 0 for state in JobState}
    return Standing(states, max(0.0, waited), max(0.0, silent))


class Leases:
    """Those of running jobs, as one worker saw them last, and since when by its own ``clock``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, whoever sets the time of day."""
        self._clock = clock
        self._since: dict[tuple[str, int, float], float] = {}  # by job, fence and end

    def unrenewed(self, session: Session, seconds: float) -> list[str]:
        """Ids of jobs whose lease has stood as it is for so long. A worker renews its own each second, whatever time of day its
        machine has: one that was written while the clock was ahead runs out here as others do.
        """
        now = self._clock()
        seen = session.execute(select(Job.id, Job.fence, Job.lease_expires).where(Job.state == JobState.RUNNING))
        self._since = {held: self._since.get(held, now) for held in ((job, fence, end) for job, fence, end in seen)}
        return [held[0] for held, since in self._since.items() if now - since > seconds]
