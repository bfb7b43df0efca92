"""What gates and guards did to one answer, for ``"unbind": {"report": true}``: counts by module and a value for each token.

Which guard ended an answer is told unasked, to the keys that may ask for reports. Fed from the engine's deltas; a page can colour
tokens with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.engine.guarding import Guarded
from server.engine.pinned import PinnedSet
from server.engine.request import Delta
from server.policy import OFF


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in values.items()}


class Report:
    """Accumulates the activations of one choice: a module's gate is open where its value is over 0.

    ``full``: whether the request asked for it; else it says nothing but what ended the answer, if a guard did. ``about``: what is
    told of a guard, by its name.
    """

    def __init__(self, pinned: PinnedSet, *, full: bool, about: Callable[[str], Mapping[str, Any]]) -> None:
        self._full, self._about = full, about
        self._guarded: Guarded | None = None
        self._strengths = {entry.module.name: pinned.strengths[entry.key] for entry in pinned.entries}
        self._labels = {entry.module.name: entry.label for entry in pinned.entries}
        self._tokens: list[Mapping[str, float]] = []
        self._own_end = False

    def add(self, delta: Delta) -> None:
        """Take in the tokens of a delta."""
        self._tokens += delta.activations
        self._guarded = delta.guarded or self._guarded
        self._own_end = delta.finish_reason == "stop" and delta.stop_reason is None

    def whole(self) -> dict[str, Any]:
        """Everything, at the end of an answer that was not streamed."""
        return {**self.totals(), **({"activations": [_rounded(v) for v in self._tokens]} if self._full else {})}

    def totals(self) -> dict[str, Any]:
        """Per module: its version, strength (0: measured only), positions evaluated and gates open; and whether the answer was
        silenced: the model ended it itself while the gate of a module that is applied was open.
        """
        done = self._guarded
        ended = (
            {"blocked": {"guard": done.blocked.label, **self._about(done.blocked.name)}}
            if done and done.blocked
            else {}
        )
        if not self._full:
            return ended
        counts: dict[str, Any] = {}
        if done:
            by_name = {"counted": sorted(done.counted), "opened": sorted(done.opened)}
            counts = {"longest_run": done.longest, "bars": done.bars, **by_name}
        last = self._tokens[-1] if self._tokens else {}
        return {
            **ended,
            **({"guards": counts} if counts else {}),
            "silenced": self._own_end
            and any(last.get(name, 0.0) > 0 for name, strength in self._strengths.items() if strength > OFF),
            "modules": [
                {
                    "module": self._labels[name],
                    "name": name,
                    "strength": strength,
                    "positions": sum(name in values for values in self._tokens),
                    "open": sum(values.get(name, 0.0) > 0 for values in self._tokens),
                }
                for name, strength in self._strengths.items()
            ],
        }

    @staticmethod
    def part(report: Report | None, delta: Delta, *, last: bool = True) -> dict[str, Any]:
        """The ``unbind`` field for one chunk of a stream; the totals with the last. Nothing without a report."""
        if report is None:
            return {}
        totals = report.totals() if last and delta.finish_reason else {}
        if not report._full:
            return {"unbind": totals} if totals else {}
        return {"unbind": {**totals, "activations": [_rounded(values) for values in delta.activations]}}

    @staticmethod
    def end(report: Report | None) -> dict[str, Any]:
        """The ``unbind`` field of a chunk that only ends the answer."""
        if report is None or not (totals := report.totals()):
            return {}
        return {"unbind": {**totals, "activations": []} if report._full else totals}
