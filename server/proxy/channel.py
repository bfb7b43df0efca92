"""One text of an answer, followed by its guards as it comes: how much of it may be sent, and whether it ends here.

A text of JSON is followed twice: as it stands, and as what its strings mean. Only what both let go is sent.
"""

from __future__ import annotations

from unbind_core.guard.book import GuardSet
from unbind_core.guard.escapes import Unescaped
from unbind_core.guard.index import GuardIndex
from unbind_core.guard.sent import Sent
from unbind_core.guard.textguard import TextGuard


class Channel:
    """Counts characters alone: the texts themselves stay where they came."""

    def __init__(self, guards: GuardSet, prompt: Sent, *, escaped: bool = False) -> None:
        self.taken = self.sent = 0
        self._plain = TextGuard(guards, prompt)
        self._meant = TextGuard(guards, prompt) if escaped else None
        self._unescaped = Unescaped()
        self._plain_sent = 0

    @property
    def blocked(self) -> GuardIndex | None:
        """The guard whose run the text completes."""
        return self._plain.blocked or (self._meant.blocked if self._meant else None)

    @property
    def counted(self) -> frozenset[str]:
        """The guards that only count and whose run the text has held."""
        return self._plain.follower.counted | (self._meant.follower.counted if self._meant else set())

    @property
    def longest(self) -> int:
        """Lexemes of the longest run so far; 0 while it is short."""
        return max(self._plain.follower.longest, self._meant.follower.longest if self._meant else 0)

    def push(self, text: str) -> None:
        """More of the text."""
        self.taken += len(text)
        self._plain_sent += len(self._plain.push(text))
        self.sent = self._plain_sent
        if self._meant is not None:
            passed = self._meant.push(self._unescaped.read(text))
            self.sent = min(self.sent, self._unescaped.passed(len(passed)))

    def end(self) -> None:
        """Nothing more comes: what is held goes, unless it completes a run so."""
        self._plain.flush()
        if self._meant is not None:
            self._meant.flush()
        if not self.blocked:
            self.sent = self.taken
