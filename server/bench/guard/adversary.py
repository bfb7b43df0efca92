"""Scripts of a model that knows a protected row and wants to say it: aloud, or by what it would rather have said."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from server.bench.guard.disguise import Spelling

MOST = 30.0  # logit of what is wanted; all else is about 0
_ASIDE = (" ", "\n", "\t", "#", "//", "/*", "*/", "x", ";", "_", ".", "\u200b")


class Forcing:
    """Says ``text``, each time by any token that goes on with it. Where another came, as after a bar, it goes on trying: the same
    again, the same from the next word on, or from anywhere.
    """

    def __init__(self, rng: random.Random, spelling: Spelling, text: str, end: int) -> None:
        self._rng, self._spelling, self._end = rng, spelling, end
        self._text, self._at = text.encode(), 0
        self._longest = rng.choice((1.0, 1.0, 0.9, 0.6, 0.0))  # how often it takes the longest token
        self._others = rng.choice((0, 1, 3))  # how many other ways it thinks of at once
        self._aside = (
            rng.random() < 0.5
        )  # whether it turns to white space, signs or junk where it is kept from going on

    def wish(self, output: Sequence[int]) -> Mapping[int, float]:
        """As ``Script`` says."""
        if output:
            self._heard(self._spelling.bytes[output[-1]])
        ways = self._spelling.beginnings(self._text, self._at)
        if not ways:
            return {self._end: MOST}
        rng = self._rng
        first = ways[-1] if rng.random() < self._longest else rng.choice(ways)
        wanted = {way: MOST - 1 - rng.random() * 3 for way in rng.sample(ways, min(len(ways), self._others))}
        if self._aside:
            wanted[self._spelling.token(rng.choice(_ASIDE))] = MOST - 2 - rng.random() * 3
        return wanted | {first: MOST}

    def wish_at(self, position: int) -> Mapping[int, float]:
        """Of the prompt it has nothing to say."""
        return {}

    def _heard(self, piece: bytes) -> None:
        if self._text.startswith(piece, self._at):
            self._at += len(piece)
            return
        way = self._rng.random()
        if way < 0.3:
            while self._at < len(self._text) and self._text[self._at : self._at + 1].isalnum():
                self._at += 1
            self._at = min(len(self._text), self._at + 1)
        elif way < 0.35:
            self._at = self._rng.randrange(len(self._text) // 2 + 1)
            while self._at and self._text[self._at] & 0xC0 == 0x80:
                self._at -= 1


class Telling:
    """At each position, prompt included, its likeliest token is the next of ``tokens``, whatever the answer says; ``said`` is
    the next likeliest, for clients that have it say something else.
    """

    def __init__(self, tokens: Sequence[int], said: Sequence[int], prompt: int, from_prompt: bool) -> None:
        self._tokens, self._said = tokens, said
        self._first = prompt if from_prompt else 1

    def wish(self, output: Sequence[int]) -> Mapping[int, float]:
        """As ``Script`` says."""
        return self._at(self._first + len(output) - 1, len(output))

    def wish_at(self, position: int) -> Mapping[int, float]:
        """As ``Script`` says."""
        return self._at(position, position) if self._first > 1 else {}

    def _at(self, told: int, said: int) -> Mapping[int, float]:
        found = {self._said[said % len(self._said)]: MOST - 5}
        return found | {self._tokens[told]: MOST} if told < len(self._tokens) else found


class Writing:
    """Says exactly these tokens, then ends: ordinary code, or own code again."""

    def __init__(self, tokens: Sequence[int], end: int) -> None:
        self._tokens, self._end = tokens, end

    def wish(self, output: Sequence[int]) -> Mapping[int, float]:
        """As ``Script`` says."""
        at = len(output)
        return {self._tokens[at] if at < len(self._tokens) else self._end: MOST}

    def wish_at(self, position: int) -> Mapping[int, float]:
        """Of the prompt it has nothing to say."""
        return {}
