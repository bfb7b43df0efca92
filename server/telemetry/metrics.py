"""The metrics of one server process, put together.

The API counts requests here; what is true of engine, registry and worker is read when somebody asks. What gates and guards did is
shown as it was read last, at set times (``gates.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from server.engine.engine import EngineStats
from server.engine.guarding import Guarded
from server.engine.modules import NO_GATES, Gates
from server.telemetry import gates
from server.telemetry.answers import SECONDS, Answers
from server.telemetry.build import register_process
from server.telemetry.figures import Figures, Present
from server.telemetry.port import Port
from server.telemetry.vllm_names import VllmNames
from server.telemetry.work import Work

# Codes of refusals that policy and keys are the reason for.
DENIALS = (
    "batch_too_large",
    "cannot_switch_off",
    "host_not_allowed",
    "invalid_api_key",
    "missing_scope",
    "module_enforced",
    "module_not_allowed",
    "module_unavailable",
    "profile_fixed",
    "profile_not_found",
    "profile_unavailable",
    "rate_limited",
    "refused_under_modules",
    "unknown_module",
)
disable_created_metrics()  # type: ignore[no-untyped-call] # a second series beside each, which nobody asks for


class _Together(Collector):
    def __init__(self, *parts: Collector) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        """What each of them has."""
        for part in self._parts:
            yield from part.collect()


class Telemetry:
    """The metrics of one application."""

    def __init__(self, read: Callable[[], Figures], engine: str, *, detail: bool = True, works: bool = False) -> None:
        """``read`` gives what is true now; ``engine``: what makes the answers. ``detail``: histograms of answers too; ``works``:
        whether a worker belongs to this server.
        """
        registry = self._registry = CollectorRegistry()
        register_process(registry, engine)
        registry.register(Present(read))
        self._delayed, self._kept, self._port = CollectorRegistry(), gates.Kept(), Port()
        self._guards = gates.Guards(self._delayed)
        self.keep_gates(NO_GATES)
        self.answers = Answers(registry, detail)
        self.work = Work(registry if works else CollectorRegistry())
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
        self._denials = Counter(
            "unbind_policy_denials", "Requests refused for policy or key", ["reason"], registry=registry
        )
        for reason in DENIALS:
            self._denials.labels(reason)

    def register(self, collector: Collector) -> None:
        """Show what another part of the server counts."""
        self._registry.register(collector)

    def name_as_vllm(self, model: str, length: int, read: Callable[[], EngineStats]) -> None:
        """Show what answers take under vLLM's names too."""
        self.answers.other_names = VllmNames(self._registry, model, length, read)

    def denied(self, code: str | None) -> None:
        """Count a refusal, where policy or a key was its reason."""
        if code in DENIALS:
            self._denials.labels(code).inc()

    def guarded(self, route: str, done: Guarded) -> None:
        """Count what guards did to one answer."""
        self._guards.take(route, done)

    def keep_gates(self, now: Gates) -> None:
        """What everybody is shown of gates and guards until the next time."""
        self._kept.show(now, self._delayed.collect())

    def exposition(self, now: Gates | None = None) -> bytes:
        """The text that Prometheus scrapes; with what gates have done up to ``now``, else what was kept last."""
        shown = self._kept if now is None else gates.Kept(now, self._delayed.collect())
        return generate_latest(_Together(self._registry, shown))

    def listen(self, host: str, port: int) -> int:
        """Show the metrics on a port of their own, and nothing else there; returns the port. Raises UnbindError."""
        return self._port.listen(_Together(self._registry, self._kept), host, port, "metrics_port")

    @property
    def port(self) -> int | None:
        """Where the metrics are shown on a port of their own."""
        return self._port.number

    def close(self) -> None:
        """Give the port back."""
        self._port.close()
