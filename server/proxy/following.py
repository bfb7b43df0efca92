"""A whole answer, or a stream, let through as its guards let it: what they do not touch leaves byte for byte as it came."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from server.proxy.channel import Channel
from server.proxy.choice import Choice, Part
from server.proxy.refusal import Unguardable
from server.proxy.texts import frame_of
from unbind_core.guard.book import GuardSet
from unbind_core.guard.index import GuardIndex
from unbind_core.guard.sent import Sent

FILTERED = "content_filter"
BYTES = 4  # of a token, about
Tell = Callable[[GuardIndex], Mapping[str, Any]]
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Following:
    """The choices of one call. ``expected``: how many there can be; ``prompt`` gives what the client sent for the choice of an
    index; ``told``: the fields that say more to the client of a choice that a guard has ended.
    """

    def __init__(
        self,
        guards: GuardSet | None,
        expected: int,
        prompt: Callable[[int], Sent],
        *,
        escaped: bool = False,
        told: Tell = lambda _: {},
    ) -> None:
        self.choices: dict[int, Choice] = {}
        self.usage: Mapping[str, Any] = {}
        self.tokens = 0  # as far as they can be told where nobody says how many they are
        self._frames: dict[int, Part] = {}  # the newest part of each choice
        self._guards, self._expected, self._prompt = guards, expected, prompt
        self._escaped, self._told = escaped, told
        self._beside: dict[str, Channel] = {}

    @property
    def cut_short(self) -> bool:
        """Whether every choice has ended, one of them at least by a guard."""
        return self.all_ended and any(choice.blocked for choice in self.choices.values())

    @property
    def all_ended(self) -> bool:
        """Whether every choice has said that it has ended."""
        return len(self.choices) == self._expected and all(choice.ended for choice in self.choices.values())

    def whole(self, document: dict[str, Any], raw: bytes) -> bytes:
        """An answer that came at once. Raises Unguardable."""
        frame, given = self._read(document)
        self.tokens = tokens_of(raw)
        for index, choice in given:
            if index in self.choices:
                raise Unguardable("two choices have the same index")
            part, following = Part(frame, choice), self._choice(index)
            following.take(part)
            following.end()
            following.leaving()
            if following.blocked is not None:
                choice.update(self._end(following.blocked))
        if any(choice.blocked for choice in self.choices.values()) or not _kept(document, frame):
            return _encode({name: document[name] for name in document if name in frame or name == "choices"}).encode()
        return raw

    def take(self, document: dict[str, Any], raw: bytes) -> list[bytes]:
        """What leaves of a stream once an event has come. Raises Unguardable."""
        frame, given = self._read(document)
        kept = _kept(document, frame)
        if not given:
            named: dict[str, Any] = {"choices": []} if "choices" in document else {}
            return [raw] if kept else [_event({**frame, **named})] if frame else []
        parts, leaving = [], []
        for index, choice in given:
            part = Part(frame, choice, raw if kept and len(given) == 1 else None, len(raw))
            following = self._choice(index)
            blocked = following.blocked
            self._frames[index] = part
            parts.append(part)
            leaving += following.take(part)
            if following.blocked is not blocked:
                leaving.append(self._last(index))
            self.tokens += 1
        if kept and parts == leaving and all(part.whole for part in parts):
            return [raw]
        return [_written(part) for part in leaving]

    def pass_by(self, lines: Iterable[tuple[str, str]]) -> None:
        """Lines of the stream that are no data, of which a server may make what it likes. Raises Unguardable."""
        if self._guards is None:
            return
        for name, text in lines:
            if name not in self._beside:
                self._beside[name] = Channel(self._guards, self._prompt(0))
            self._beside[name].push(f"{text}\n")
            if self._beside[name].blocked is not None:
                raise Unguardable("lines beside the data hold text that is protected")

    def finish(self) -> list[bytes]:
        """What leaves once the stream has ended: what choices held that did not say that they had."""
        found: list[Part] = []
        for index, choice in self.choices.items():
            if not choice.ended:
                choice.end()
                found += choice.leaving()
                found += [self._last(index)] if choice.blocked is not None else []
        return [_written(part) for part in found]

    def _read(self, document: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
        frame, choices = frame_of(document), document.get("choices")
        if isinstance(usage := document.get("usage"), dict):
            self.usage = usage
        if choices is not None and not isinstance(choices, list):
            raise Unguardable("'choices' is no list")
        found = []
        for choice in choices or ():
            index = choice.get("index", 0 if self._expected == 1 else None) if isinstance(choice, dict) else None
            if not isinstance(index, int) or not 0 <= index < self._expected:
                raise Unguardable(f"a choice is none of the {self._expected} that were asked for")
            found.append((index, choice))
        return frame, found

    def _choice(self, index: int) -> Choice:
        if index not in self.choices:
            self.choices[index] = Choice(self._guards, self._prompt(index), escaped=self._escaped)
        return self.choices[index]

    def _end(self, guard: GuardIndex) -> dict[str, Any]:
        return {"finish_reason": FILTERED, **self._told(guard)}

    def _last(self, index: int) -> Part:
        """The part that ends a choice which a guard has ended, in the form of those before it."""
        newest, guard = self._frames[index], self.choices[index].blocked
        assert guard is not None
        text: dict[str, Any] = {"text": ""} if "text" in newest.choice else {"delta": {}}
        return Part(newest.frame, {"index": index, **text, "logprobs": None, **self._end(guard)})


def tokens_of(raw: bytes) -> int:
    """About how many tokens a text has."""
    return -(-len(raw) // BYTES)


def _kept(document: Mapping[str, Any], frame: Mapping[str, Any]) -> bool:
    """Whether nothing of what stands around the choices was left out."""
    return document.keys() - {"choices"} == frame.keys()


def _written(part: Part) -> bytes:
    if part.raw is not None and part.whole:
        return part.raw
    return _event({**part.frame, "choices": [part.choice]})


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(document).encode() + b"\n\n"
