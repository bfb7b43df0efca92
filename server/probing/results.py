"""What canaries found: the newest outcome of each probe of each module, their metrics, and what readiness and people hear.

``rounds`` finds them. Neither prompts nor answers come here.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Probe = Literal["extraction", "control", "short"]
Result = Literal["hit", "miss", "error"]
PROBES: tuple[Probe, ...] = get_args(Probe)
DECIDING: tuple[Probe, ...] = ("extraction", "control")  # a short prompt may give a gate too little to go by
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True)
class Outcome:
    """What a probe found, ``seconds`` of asking, when (epoch seconds), and in words why it is no hit."""

    result: Result
    seconds: float
    at: float
    reason: str = ""


class Canaries:
    """The outcomes of one server. ``pending``: canaries are to run, and the first round is not through."""

    def __init__(self) -> None:
        registry = self.metrics = CollectorRegistry()
        by = ["module", "probe"]
        self._runs = Counter("unbind_canary_runs", "Canaries by what they found", [*by, "result"], registry=registry)
        self._seconds = Histogram(
            "unbind_canary_seconds", "Time of a canary's requests", ["probe"], buckets=SECONDS, registry=registry
        )
        self._last_hit = Gauge(
            "unbind_canary_last_hit_timestamp_seconds",
            "When a canary last found that the module does what it should",
            by,
            registry=registry,
        )
        self.pending = False
        self._digests: dict[str, str] = {}  # of the version that the outcomes are of
        self._outcomes: dict[str, dict[Probe, Outcome]] = {}
        self._decided: dict[str, dict[Probe, Outcome]] = {}  # the newest that is no error
        self._idle: dict[str, dict[Probe, str]] = {}  # why a probe is not run

    def found(self, module: str, digest: str, probe: Probe, outcome: Outcome) -> Result | None:
        """Take in what a probe of one version of a module found; what it found the time before, None where it had not run."""
        self._of(module, digest)
        before = self._outcomes[module].get(probe)
        self._idle[module].pop(probe, None)
        self._outcomes[module][probe] = outcome
        self._runs.labels(module, probe, outcome.result).inc()
        if outcome.result != "error":
            self._decided[module][probe] = outcome
            self._seconds.labels(probe).observe(outcome.seconds)
        if outcome.result == "hit":
            self._last_hit.labels(module, probe).set(outcome.at)
        return before.result if before is not None else None

    def left_out(self, module: str, digest: str, probe: Probe, reason: str) -> None:
        """Say why a probe cannot be run; its metrics go, so that nothing rests on an old one."""
        self._of(module, digest)
        self._idle[module][probe] = reason
        self._forget(module, probe)

    def keep(self, modules: Collection[str]) -> None:
        """Forget the modules that are not among these."""
        for module in self._digests.keys() - set(modules):
            for probe in PROBES:
                self._forget(module, probe)
            for held in (self._digests, self._outcomes, self._decided, self._idle):
                held.pop(module, None)

    def misses(self, modules: Collection[str]) -> list[str]:
        """What a server should not be ready for, of these modules, in words."""
        return [
            f"the canary of module '{module}' misses ({probe}: {outcome.reason})"
            for module in sorted(modules)
            for probe, outcome in self._decided.get(module, {}).items()
            if probe in DECIDING and outcome.result == "miss"
        ]

    def about(self, module: str, digest: str) -> dict[str, Any]:
        """``{"told", "probes"}`` of a version of a module; nothing where canaries do not run."""
        if self._digests.get(module) != digest:
            return {"told": "not run yet", "probes": {}} if self.pending else {}
        outcomes, idle = dict(self._outcomes[module]), dict(self._idle[module])
        told = [f"{probe}: {_words(found)}" for probe in PROBES if (found := outcomes.get(probe))]
        told += [f"{probe}: not run, {idle[probe]}" for probe in PROBES if probe in idle]
        probes = {probe: vars(outcome) for probe, outcome in outcomes.items()}
        return {"told": "; ".join(told), "probes": probes | {probe: {"left_out": why} for probe, why in idle.items()}}

    def _of(self, module: str, digest: str) -> None:
        if self._digests.get(module) != digest:
            self._digests[module] = digest
            self._outcomes[module], self._decided[module], self._idle[module] = {}, {}, {}

    def _forget(self, module: str, probe: Probe) -> None:
        for held in (self._outcomes, self._decided):
            held.get(module, {}).pop(probe, None)
        self._last_hit.remove(module, probe)
        for result in get_args(Result):
            self._runs.remove(module, probe, result)


def _words(outcome: Outcome) -> str:
    when = time.strftime("%H:%M:%S UTC", time.gmtime(outcome.at))
    return f"{outcome.result} at {when}" + (f" ({outcome.reason})" if outcome.reason else "")
