"""What is often done instead of guarding answers: refusing prompts that look like protected rows. Plain, to compare with."""

from __future__ import annotations

from collections.abc import Iterable

from server.bench.guard.matcher import lexemes, runs

RUN = 12  # lexemes of a row in a row
NEAR, GRAM = 0.5, 3  # or so large a share of the prompt's runs of three


class PromptFilter:
    """Refuses a prompt that holds RUN lexemes of a protected row in a row, or so large a share of whose runs of GRAM stands in one:
    NEAR.
    """

    def __init__(self, rows: Iterable[str]) -> None:
        self._runs: set[str] = set()
        self._grams: list[set[str]] = []
        for row in rows:
            words, _ = lexemes(row)
            self._runs.update(runs(words, RUN))
            self._grams.append(set(runs(words, GRAM)))

    def refuses(self, prompt: str) -> bool:
        """Whether a request with this prompt gets no answer."""
        words, _ = lexemes(prompt)
        if not self._runs.isdisjoint(runs(words, RUN)):
            return True
        grams = set(runs(words, GRAM))
        return bool(grams) and max(len(grams & row) for row in self._grams) >= NEAR * len(grams)
