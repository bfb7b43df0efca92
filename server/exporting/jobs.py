"""A job as spans: one from its claim to its end at this worker, and one for each stage that was finished."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from server.exporting.otel import Tracing, Value
from server.registry.jobs import Claim, Jobs
from server.registry.tables import JobState
from server.registry.transactions import Transactions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span


class TracedJobs(Jobs):
    """The jobs of a registry, as a worker uses them: one at a time."""

    def __init__(self, transactions: Transactions, tracing: Tracing) -> None:
        super().__init__(transactions)
        self._tracing = tracing
        self._open: tuple[str, Span] | None = None

    def claim(self, owner: str, now: float, lease: float, max_attempts: int) -> Claim | None:
        """See :meth:`Jobs.claim`."""
        claim = super().claim(owner, now, lease, max_attempts)
        if claim is not None:
            self._ended("lease_lost")  # of the job before, if nobody ended that
            span = self._tracing.open(f"job {claim.kind}", time.time_ns())
            named: dict[str, Value] = {"id": claim.job_id, "kind": str(claim.kind), "module": claim.module}
            span.set_attributes({f"unbind.job.{name}": value for name, value in named.items()})
            span.set_attribute("unbind.job.attempt", claim.attempt)
            self._open = claim.job_id, span
        return claim

    def stage_done(self, claim: Claim, stage: str, done: Mapping[str, Any]) -> None:
        """See :meth:`Jobs.stage_done`."""
        super().stage_done(claim, stage, done)
        if self._open is not None:
            now = time.time_ns()
            begun = now - int(float(done["seconds"]) * 1e9)
            self._tracing.span(f"stage {stage}", begun, now, {"unbind.job.id": claim.job_id}, within=self._open[1])

    def finish(self, claim: Claim, state: JobState, now: float, **fields: Any) -> None:
        """See :meth:`Jobs.finish`."""
        super().finish(claim, state, now, **fields)
        self._ended("failed" if state == JobState.FAILED else "", str(state))

    def release(self, claim: Claim, now: float, *, died: bool = False) -> None:
        """See :meth:`Jobs.release`."""
        super().release(claim, now, died=died)
        self._ended("worker_died" if died else "", "queued")

    def _ended(self, error: str, state: str = "") -> None:
        if self._open is not None:
            span, self._open = self._open[1], None
            self._tracing.end(span, time.time_ns(), {"unbind.job.state": state} if state else {}, error)
