"""What gates and guards did, which is shown at set times.

Who sees it at any moment can tell from two readings what the gates made of one prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from server.engine.guarding import Guarded
from server.engine.modules import NO_GATES, Gates
from unbind_core.applying.looks import BOUNDARIES

LEXEMES = (8, 12, 16, 20, 25, 30, 35, 40, 45, 49, 50, 75, 100, 200, 500)


class Guards:
    """What guards did to answers, counted as these end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by = ["module", "route"]
        self._bars = Counter("unbind_guard_bars", "Runs that an answer was steered away from", by, registry=registry)
        self._stops = Counter("unbind_guard_stops", "Answers that a guard ended", by, registry=registry)
        self._would = Counter(
            "unbind_guard_would_block", "Answers with a run that was only counted", by, registry=registry
        )
        self._opened = Counter(
            "unbind_guard_opened", "Answers in which a guard held its module's gate open", by, registry=registry
        )
        self._runs = Histogram(
            "unbind_guard_run_lexemes",
            "Longest protected run of an answer, where it is half of what is allowed or more",
            ["route"],
            buckets=LEXEMES,
            registry=registry,
        )

    def take(self, route: str, done: Guarded) -> None:
        """Count what guards did to one answer."""
        for name, bars in done.bars.items():
            self._bars.labels(name, route).inc(bars)
        if done.blocked is not None:
            self._stops.labels(done.blocked.name, route).inc()
        for name in done.counted:
            self._would.labels(name, route).inc()
        for name in done.opened:
            self._opened.labels(name, route).inc()
        if done.longest:
            self._runs.labels(route).observe(done.longest)


def families(now: Gates) -> Iterable[Metric]:
    """Positions evaluated and gates open, by module and phase; scores, and requests in which a gate opened, by module."""
    labels = ["module", "phase"]
    evaluated = CounterMetricFamily(
        "unbind_gate_evaluations", "Positions at which a module's gate was read", labels=labels
    )
    opened = CounterMetricFamily(
        "unbind_gate_activations", "Positions at which a module's gate was open", labels=labels
    )
    for name, phases in sorted(now.counts.items()):
        for phase, (positions, open_gates) in phases.items():
            evaluated.add_metric([name, phase], positions)
            opened.add_metric([name, phase], open_gates)
    yield evaluated
    yield opened
    if not now.looks:
        return
    scores = HistogramMetricFamily(
        "unbind_gate_score", "Scores of a module's gate, in units of its threshold", labels=["module"]
    )
    requests = CounterMetricFamily(
        "unbind_module_open_requests", "Requests in which a module's gate was open", labels=["module"]
    )
    for name, look in sorted(now.looks.items()):
        # no sum: it means nothing where there are buckets below 0
        buckets = [*zip(map(floatToGoString, BOUNDARIES), look.below, strict=True), ("+Inf", look.positions)]
        scores.add_metric([name], buckets, None)
        requests.add_metric([name], look.requests)
    yield scores
    yield requests


class Kept(Collector):
    """What gates and guards had done when somebody looked last. It is written out when somebody asks: of thousands of modules that
    takes half a second.
    """

    def __init__(self, now: Gates = NO_GATES, guards: Iterable[Metric] = ()) -> None:
        """``guards``: families of what these did."""
        self._shown = now, tuple(guards)
        self._written: tuple[Gates | None, tuple[Metric, ...]] = None, ()

    def show(self, now: Gates, guards: Iterable[Metric]) -> None:
        """Have it be that of a later moment."""
        before = self._shown[0]
        self._shown = before if now == before else now, tuple(guards)  # what is as before is not written out again

    def collect(self) -> Iterable[Metric]:
        """A family each."""
        (now, guards), (of, written) = self._shown, self._written
        if of is not now:
            written = tuple(families(now))
            self._written = now, written
        return (*written, *guards)
