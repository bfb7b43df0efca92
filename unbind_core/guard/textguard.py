"""A guard for text that a sampler has chosen already: it is withheld while a run goes on, and dropped where the run is complete.

What is withheld is at most N/2 lexemes and what stands between them, and only once N/2 have been sent: other text passes at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from unbind_core.guard.book import GuardSet
from unbind_core.guard.follower import Follower
from unbind_core.guard.index import GuardIndex
from unbind_core.guard.sent import Sent

_PIECES = re.compile(r"\w+|\W")


class TextGuard:
    """One text of an answer under ``guards``, whatever their action. Its parts may be cut anywhere: what is sent is the same, but
    that of a word with a run of a secret in it nothing is sent where it comes whole.
    """

    def __init__(self, guards: GuardSet, prompt: Sent | Callable[[], str]) -> None:
        self.follower = Follower(guards, prompt)
        self.blocked: GuardIndex | None = None
        self._held = ""

    @property
    def held(self) -> str:
        """Text that has come and may not be sent yet."""
        return self._held

    def push(self, text: str) -> str:
        """The text that may be sent after ``text`` has come; nothing any more once ``blocked`` says which guard's run it held."""
        sent = []
        for piece in _PIECES.findall(text):
            if self.blocked:
                break
            verdict = self.follower.take(piece)
            if verdict.sure:
                self.blocked, self._held = verdict.sure[0], ""
                break
            self._held += piece
            if not (verdict.long or verdict.now):
                sent.append(self._held)
                self._held = ""
        return "".join(sent)

    def flush(self) -> str:
        """What is still held at the end of the text: all of it, or nothing where the end completes a run."""
        if self._held and not self.blocked and (now := self.follower.take("").now):
            self.blocked = now[0]
        text, self._held = "" if self.blocked else self._held, ""
        return text
