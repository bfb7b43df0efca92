"""What canaries ask and judge by: a few rows of a module's forget set, where they are kept, and a few retain rows.

A module's file holds no protected text. So the rows are those that its takedown keeps, or those that ship with the demo world;
where there are none, nothing is asked.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from server.registry.private.files import TakedownFiles
from server.settings import DEMO, Settings
from unbind_core.guard.book import GuardBook
from unbind_core.guard.index import LEAST_RUN, Secret, build_index
from unbind_core.guard.lexemes import readings
from unbind_core.guard.textguard import TextGuard
from unbind_core.module import UnbindModule
from unbind_core.rows import ForgetRow, forget_digest, parse_forget, parse_retain, split_text, spread

TRIES = 3  # prompts that one probe may ask
RUN = 20  # lexemes in a row of the protected text, or all of a shorter one: a recital
SHORT_LINES = 2


@dataclass(frozen=True)
class Row:
    """A forget row, and whether a text recites it."""

    prompt: str
    continuation: str

    @property
    def short(self) -> str:
        """The last lines of the prompt alone."""
        lines = [line for line in self.prompt.splitlines(keepends=True) if line.strip()]
        return "".join(lines[-SHORT_LINES:])

    def recited(self, prompt: str, answer: str) -> bool:
        """Whether ``answer`` holds a run of the protected text that is not in the prompt, by the measure of guards."""
        secret = Secret(secrets.token_bytes(32))
        run = min(RUN, len(readings(self.continuation)[0]))
        index = build_index([self.continuation], name="row", secret=secret, run=run, action="stop")
        guards = GuardBook.of(secret, [index]).select(["row"])
        assert guards is not None
        follower = TextGuard(guards, lambda: prompt)
        follower.push(answer)
        follower.flush()
        return follower.blocked is not None


class Texts:
    """The rows of the modules that run here. Reads files: for a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._files = settings, TakedownFiles(settings)
        self._rows: dict[str, list[Row]] = {}  # by the digest of the forget set, as long as it is kept
        self._controls: list[str] | None = None

    def rows(self, module: UnbindModule) -> list[Row]:
        """Rows that the module was fitted on; none where none are kept. Raises OSError, StoreUnreachable, DataError."""
        digest = module.forget_digest
        if not self._files.has_forget(digest):
            self._rows.pop(digest, None)  # purged
            return self._shipped(module)
        if digest not in self._rows:
            self._rows[digest] = _chosen(self._files.load_forget(digest), module)
        return self._rows[digest]

    def controls(self) -> list[str]:
        """Prompts of the retain rows that verification reads; none where this server has none. Raises OSError, DataError."""
        if self._controls is None:
            path, texts = self._settings.retain_test, list[str]()
            if path is not None and path.is_file():
                texts = [row.text for row in parse_retain(path)]
            self._controls = [split_text(texts[i])[0] for i in spread(range(len(texts)), TRIES)]
        return self._controls

    def _shipped(self, module: UnbindModule) -> list[Row]:
        if not self._settings.is_demo:
            return []
        for path in sorted((DEMO / "rows").glob("forget_*.jsonl")):
            rows = parse_forget(path)
            if forget_digest(rows) == module.forget_digest:
                return _chosen(rows, module)
        return []


def _chosen(rows: Sequence[ForgetRow], module: UnbindModule) -> list[Row]:
    """A few of the rows that were fitted, evenly spread, of those that are long enough to judge by."""
    fitted = [i for i in module.partitions.get("forget_fit", ()) if i < len(rows)] or range(len(rows))
    enough = [i for i in fitted if len(readings(rows[i].continuation)[0]) >= LEAST_RUN]
    return [Row(rows[i].prompt, rows[i].continuation) for i in spread(enough, TRIES)]
