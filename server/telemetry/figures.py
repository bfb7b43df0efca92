"""What is true at the moment of a scrape: read then, and kept nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine.engine import EngineStats
from server.engine.pinned import LoadedModule
from server.outage import Outage
from server.registry.estimate import Standing


@dataclass(frozen=True)
class Figures:
    """What is true at this moment; what is None nobody here knows, and it is left out.

    ``engine``: None where another server makes the answers. ``missing``: modules in use that could not be loaded; ``skipped``:
    refused files; ``audit``: signs of tampering in the trail; ``registry``, ``store``: whether they can be seen, where anybody
    looks. ``modules``: those that are loaded; ``enforced``: by name of the modules that policy enforces, whether they apply.
    ``jobs``: as the registry had them last; ``worker``: whether this server's own lives, and how often it was started again.
    """

    running: int
    missing: int
    skipped: int
    audit: int
    engine: EngineStats | None = None
    registry: Outage | None = None
    store: Outage | None = None
    modules: Mapping[str, LoadedModule] = field(default_factory=dict)
    enforced: Mapping[str, bool] = field(default_factory=dict)
    jobs: Standing | None = None
    worker: tuple[bool, int] | None = None


class Present(Collector):
    """Every figure, read when it is asked for."""

    def __init__(self, read: Callable[[], Figures]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """One family each."""
        now = self._read()
        yield GaugeMetricFamily("unbind_requests_running", "Requests that hold a slot", now.running)
        yield GaugeMetricFamily("unbind_modules_loaded", "Modules a request can name", len(now.modules))
        yield GaugeMetricFamily("unbind_modules_missing", "Modules in use that could not be loaded", now.missing)
        yield GaugeMetricFamily("unbind_module_files_skipped", "Module files that could not be loaded", now.skipped)
        text = "Signs of tampering known in the audit trail; 0 where it is whole"
        yield GaugeMetricFamily("unbind_audit_problems", text, now.audit)
        if now.engine is not None:
            yield from _engine(now.engine)
        yield from _seen("unbind_registry", "registry's database", now.registry)
        yield from _seen("unbind_store", "module store", now.store)
        yield from _modules(now.modules)
        yield from _enforced(now.enforced)
        if now.jobs is not None:
            yield from _jobs(now.jobs)
        if now.worker is not None:
            up, restarts = now.worker
            yield GaugeMetricFamily("unbind_worker_up", "Whether the worker runs and gives signs of life", float(up))
            yield CounterMetricFamily(
                "unbind_worker_restarts", "Times this server's worker was started again", restarts
            )


def _engine(stats: EngineStats) -> Iterable[Metric]:
    yield GaugeMetricFamily("unbind_requests_waiting", "Requests in the queue", stats.waiting)
    yield GaugeMetricFamily("unbind_slots", "Slots there are", stats.slots)
    if stats.kv_usage is not None:
        text = "Share of the memory for keys and values that running requests hold"
        yield GaugeMetricFamily("unbind_kv_cache_usage_ratio", text, stats.kv_usage)
    for name, text, count in (
        ("unbind_engine_steps", "Engine steps", stats.steps),
        ("unbind_engine_failed_requests", "Requests the engine failed", stats.failures),
        ("unbind_engine_preemptions", "Requests that gave their pages up and were computed again", stats.preemptions),
        ("unbind_cancelled_requests", "Requests whose client left before the end of the answer", stats.cancelled),
    ):
        if count is not None:
            yield CounterMetricFamily(name, text, count)


def _seen(name: str, what: str, outage: Outage | None) -> Iterable[Metric]:
    if outage is not None:
        yield GaugeMetricFamily(f"{name}_reachable", f"Whether the {what} answers: 1 or 0", float(outage.told is None))
        yield GaugeMetricFamily(f"{name}_seen_seconds", f"Seconds since the {what} answered last", outage.age)


def _modules(loaded: Mapping[str, LoadedModule]) -> Iterable[Metric]:
    info = GaugeMetricFamily(
        "unbind_module_info", "A loaded module: always 1", labels=["module", "digest", "layer", "policy"]
    )
    threshold = GaugeMetricFamily(
        "unbind_module_threshold", "Where a module's gate opens, in its detector's own units", labels=["module"]
    )
    rate = GaugeMetricFamily(
        "unbind_module_calibrated_rate",
        "Share of positions at which the gate was open when the module was calibrated",
        labels=["module", "side"],
    )
    for name, entry in sorted(loaded.items()):
        module = entry.module
        info.add_metric([name, entry.digest[:12], str(module.layer), module.policy], 1)
        threshold.add_metric([name], module.tau)
        for side, share in calibrated_rates(module.measured).items():
            rate.add_metric([name, side], share)
    return info, threshold, rate


def calibrated_rates(measured: Mapping[str, Any]) -> dict[str, float]:
    """Side -> share of positions at which the gate was open, of what a module's file says was measured.

    On retain rows that chose nothing where there were some, else on those that chose the module.
    """
    certified = measured.get("certificate", {}).get("open_rate", {}).get("observed")
    chosen = measured.get("cost", {}).get("open_rate", measured.get("retain_open_rate"))
    found = {"forget": measured.get("forget_open_rate"), "retain": chosen if certified is None else certified}
    return {side: float(share) for side, share in found.items() if isinstance(share, int | float)}


def _enforced(enforced: Mapping[str, bool]) -> Iterable[Metric]:
    wanted = GaugeMetricFamily("unbind_module_enforced", "A module that policy enforces here: 1", labels=["module"])
    loaded = GaugeMetricFamily(
        "unbind_module_enforced_loaded", "Whether an enforced module is loaded and applies: 1 or 0", labels=["module"]
    )
    for name, applies in sorted(enforced.items()):
        wanted.add_metric([name], 1)
        loaded.add_metric([name], float(applies))
    return wanted, loaded


def _jobs(standing: Standing) -> Iterable[Metric]:
    jobs = GaugeMetricFamily("unbind_jobs", "Jobs in the registry", labels=["state"])
    for state, count in standing.states.items():
        jobs.add_metric([state], count)
    yield jobs
    yield GaugeMetricFamily(
        "unbind_job_queue_oldest_seconds", "How long the oldest queued job has waited; 0 without one", standing.waited
    )
    yield GaugeMetricFamily(
        "unbind_job_lease_age_seconds",
        "How long the worker of a running job has said nothing, the most silent one's; 0 without one",
        standing.silent,
    )
