"""Every Prometheus metric, in one place.

Labels are module names, phases, routes and status codes: nothing that a client invents. The API counts requests here;
the engine's figures are read when somebody asks. What the gates counted is read at set times: who sees it at any moment can
tell from two readings what the gates made of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine.engine import EngineStats
from server.engine.guarding import Guarded
from server.engine.modules import Counts
from server.outage import Outage
from unbind_core.errors import UnbindError

LEXEMES = (8, 12, 16, 20, 25, 30, 35, 40, 45, 49, 50, 75, 100, 200, 500)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclass(frozen=True)
class Figures:
    """What is true at this moment.

    ``missing``: modules in use that could not be loaded; ``skipped``: refused files; ``audit``: signs of tampering in the trail;
    ``registry``, ``store``: whether they can be seen, where anybody looks.
    """

    engine: EngineStats
    loaded: int
    missing: int
    skipped: int
    audit: int
    registry: Outage | None = None
    store: Outage | None = None


class _Gates(Collector):
    """The bank's own counters, as read last."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

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


class _Present(Collector):
    """Gauges, read when they are asked for."""

    def __init__(self, read: Callable[[], Figures]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """One figure each."""
        now = self._read()
        for name, text, value in (
            ("unbind_requests_running", "Requests that hold a slot", now.engine.running),
            ("unbind_requests_waiting", "Requests in the queue", now.engine.waiting),
            ("unbind_slots", "Slots there are", now.engine.slots),
            ("unbind_engine_steps", "Engine steps since start", now.engine.steps),
            ("unbind_engine_failed_requests", "Requests the engine failed since start", now.engine.failures),
            ("unbind_modules_loaded", "Modules a request can name", now.loaded),
            ("unbind_modules_missing", "Modules in use that could not be loaded", now.missing),
            ("unbind_module_files_skipped", "Module files that could not be loaded", now.skipped),
            ("unbind_audit_problems", "Signs of tampering known in the audit trail; 0 where it is whole", now.audit),
        ):
            yield GaugeMetricFamily(name, text, value)
        for reachable, seen, what, outage in (
            ("unbind_registry_reachable", "unbind_registry_seen_seconds", "registry's database", now.registry),
            ("unbind_store_reachable", "unbind_store_seen_seconds", "module store", now.store),
        ):
            if outage is not None:
                yield GaugeMetricFamily(reachable, f"Whether the {what} answers: 1 or 0", float(outage.told is None))
                yield GaugeMetricFamily(seen, f"Seconds since the {what} answered last", outage.age)


class _Together(Collector):
    def __init__(self, *parts: Collector) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        """What each of them has."""
        for part in self._parts:
            yield from part.collect()


class Telemetry:
    """The metrics of one application."""

    def __init__(self, read: Callable[[], Figures]) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_Present(read))
        self._gates = _Gates({})
        self._port: tuple[WSGIServer, Thread] | None = None
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
        by = ["module", "route"]
        self._bars = Counter("unbind_guard_bars", "Runs that an answer was steered away from", by, registry=registry)
        self._stops = Counter("unbind_guard_stops", "Answers that a guard ended", by, registry=registry)
        self._would = Counter(
            "unbind_guard_would_block", "Answers with a run that was only counted", by, registry=registry
        )
        self._runs = Histogram(
            "unbind_guard_run_lexemes",
            "Longest protected run of an answer, where it is half of what is allowed or more",
            ["route"],
            buckets=LEXEMES,
            registry=registry,
        )

    def guarded(self, route: str, done: Guarded) -> None:
        """Count what guards did to one answer."""
        for name, bars in done.bars.items():
            self._bars.labels(name, route).inc(bars)
        if done.blocked is not None:
            self._stops.labels(done.blocked.name, route).inc()
        for name in done.counted:
            self._would.labels(name, route).inc()
        if done.longest:
            self._runs.labels(route).observe(done.longest)

    def register(self, collector: Collector) -> None:
        """Show what another part of the server counts."""
        self._registry.register(collector)

    def keep_gates(self, counts: Counts) -> None:
        """What everybody is shown of the gates until the next time."""
        self._gates.counts = counts

    def exposition(self, counts: Counts | None = None) -> bytes:
        """The text that Prometheus scrapes; with the gates' ``counts`` of this moment, else those kept last."""
        gates = self._gates if counts is None else _Gates(counts)
        return generate_latest(_Together(self._registry, gates))

    def listen(self, host: str, port: int) -> int:
        """Show the metrics on a port of their own, and nothing else there; returns the port. Raises UnbindError."""
        everything = CollectorRegistry()
        everything.register(_Together(self._registry, self._gates))
        try:
            self._port = start_http_server(port, host, everything)
        except OSError as error:
            raise UnbindError(
                f"metrics_port: cannot listen on {host}:{port} ({error.strerror or error}); choose another"
            ) from None
        return self._port[0].server_port

    @property
    def port(self) -> int | None:
        """Where the metrics are shown on a port of their own."""
        return None if self._port is None else self._port[0].server_port

    def close(self) -> None:
        """Give the port back."""
        if self._port is not None:
            server, thread = self._port
            server.shutdown()
            thread.join()
            server.server_close()
            self._port = None
