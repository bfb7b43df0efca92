"""Which texts are nearly the same: shares of runs of lexemes, whatever the indentation, comments or line ends."""

from __future__ import annotations

from collections import Counter, defaultdict

from unbind_core.guard.lexemes import parts

RUN = 5  # lexemes
ALIKE = 0.5  # of the runs of the smaller text stand in the other


class Seen:
    """Texts that were taken. A text is near another when at least ALIKE of the smaller one's runs are runs of the other."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._holders: dict[int, list[int]] = defaultdict(list)

    def near(self, text: str) -> bool:
        """Whether a text that was added is near this one."""
        runs = _runs(text)
        shared = Counter(index for run in runs for index in self._holders.get(run, ()))
        return any(count >= ALIKE * min(len(runs), self._sizes[index]) for index, count in shared.items())

    def add(self, text: str) -> None:
        """One more that others may be near."""
        runs = _runs(text)
        for run in runs:
            self._holders[run].append(len(self._sizes))
        self._sizes.append(len(runs))


def _runs(text: str) -> set[int]:
    words = [word for word in parts("", text + "\n")[0] if word.strip()]
    return {hash(tuple(words[at : at + RUN])) for at in range(max(1, len(words) - RUN + 1))}
