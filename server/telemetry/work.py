"""What a takedown worker has done: shown by the server that runs it, or on a port of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.telemetry.build import register_process
from server.telemetry.port import Port

STAGE_SECONDS = (0.1, 0.5, 1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200)


class Work:
    """Stages and jobs that have ended since the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stages = Histogram(
            "unbind_job_stage_seconds", "Time of a finished stage", ["stage"], buckets=STAGE_SECONDS, registry=registry
        )
        self._jobs = Counter("unbind_worker_jobs", "Jobs that this worker has ended", ["state"], registry=registry)

    def take(self, news: Mapping[str, Any]) -> None:
        """{"stage", "seconds"} of a stage that has finished, or {"ended": the state} of a job that has."""
        if "stage" in news:
            self._stages.labels(str(news["stage"])).observe(float(news["seconds"]))
        if "ended" in news:
            self._jobs.labels(str(news["ended"])).inc()


class WorkPort:
    """The metrics of a worker that no server runs."""

    def __init__(self, host: str, port: int) -> None:
        """Listen at once. Raises UnbindError."""
        registry = CollectorRegistry()
        register_process(registry, "worker")
        Gauge("unbind_worker_up", "Whether the worker runs and gives signs of life", registry=registry).set(1)
        self.work = Work(registry)
        self._port = Port()
        self.number = self._port.listen(registry, host, port, "worker_metrics_port")

    def close(self) -> None:
        """Give the port back."""
        self._port.close()
