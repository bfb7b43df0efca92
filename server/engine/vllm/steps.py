"""What vLLM tells of its steps."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class Steps(StatLoggerBase):  # type: ignore[misc]
    """Counts the steps of an engine core, and the requests that gave their pages up."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.steps = self.preemptions = 0
        self.kv_usage: float | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """One step's statistics."""
        self.steps += 1
        self.preemptions += getattr(iteration_stats, "num_preempted_reqs", 0)
        self.kv_usage = getattr(scheduler_stats, "kv_cache_usage", self.kv_usage)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
