"""Every Prometheus metric, in one place.

Labels are module names, phases, routes and status codes: nothing that a client invents. The API counts requests here;
engine and gate figures are read when ``/metrics`` is asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine.engine import EngineStats
from server.engine.modules import Counts

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _Gates(Collector):
    """The bank's own counters, as read last."""

    def __init__(self) -> None:
        self.counts: Counts = {}

    def collect(self) -> Iterable[Metric]:
        """Positions evaluated and gates open, by module and phase."""
        labels = ["module", "phase"]
        evaluated = CounterMetricFamily(
            "unbind_gate_evaluations", "Positions at which a module's gate was read", labels=labels
        )
        opened = CounterMetricFamily(
            "unbind_gate_activations", "Positions at which a module's gate was open", labels=labels
        )
        for name, phases in sorted(self.counts.items()):
            for phase, (positions, open_gates) in phases.items():
                evaluated.add_metric([name, phase], positions)
                opened.add_metric([name, phase], open_gates)
        return [evaluated, opened]


class Telemetry:
    """One registry of metrics for one application."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._gates = _Gates()
        registry.register(self._gates)
        self.requests = Counter(
            "unbind_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "unbind_request_seconds", "Time to the end of the answer", ["route"], buckets=SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "unbind_first_token_seconds", "Time to the first token", buckets=SECONDS, registry=registry
        )
        self.prompt_tokens = Counter("unbind_prompt_tokens", "Prompt tokens taken in", registry=registry)
        self.generated_tokens = Counter("unbind_generated_tokens", "Tokens generated", registry=registry)
        self.module_requests = Counter("unbind_module_requests", "Requests by module", ["module"], registry=registry)
        self._running = Gauge("unbind_requests_running", "Requests that hold a slot", registry=registry)
        self._waiting = Gauge("unbind_requests_waiting", "Requests in the queue", registry=registry)
        self._slots = Gauge("unbind_slots", "Slots there are", registry=registry)
        self._steps = Gauge("unbind_engine_steps", "Engine steps since start", registry=registry)
        self._failures = Gauge(
            "unbind_engine_failed_requests", "Requests the engine failed since start", registry=registry
        )
        self._modules = Gauge("unbind_modules_loaded", "Modules a request can name", registry=registry)
        self._skipped = Gauge("unbind_module_files_skipped", "Module files that could not be loaded", registry=registry)

        self.audit_problems = Gauge(
            "unbind_audit_problems",
            "Signs of tampering known in the audit trail; 0 where it is whole",
            registry=registry,
        )

    def exposition(self, counts: Counts, stats: EngineStats, modules: int, skipped: int) -> bytes:
        """The text that Prometheus scrapes, with the figures given."""
        self._gates.counts = counts
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._slots.set(stats.slots)
        self._steps.set(stats.steps)
        self._failures.set(stats.failures)
        self._modules.set(modules)
        self._skipped.set(skipped)
        return generate_latest(self._registry)
