"""One choice of an answer on its way: its parts come in, and leave as its guards let them.

A part leaves whole, as it came, or it is cut, and with it its choice ends. Parts never overtake each other. What is withheld of a
text withholds everything that came with it or after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from server.engine.guarding import Guarded
from server.proxy.channel import Channel
from server.proxy.refusal import Unguardable
from server.proxy.texts import ARGUMENTS, NUMBERS, Text, texts_of
from unbind_core.guard.book import GuardSet
from unbind_core.guard.index import GuardIndex
from unbind_core.guard.sent import Sent

MOST_CHANNELS = 512  # tool calls, ranks of alternatives and names that the other server invents
MOST_HELD = 8 * 1024 * 1024  # bytes


@dataclass(eq=False)
class Part:
    """What one choice has in one event, or in a whole answer. ``raw``: the event, where the part is all of it."""

    frame: Mapping[str, Any]
    choice: dict[str, Any]
    raw: bytes | None = None
    size: int = 0
    # each with where it ends in its channel; None for what came behind the end of the choice
    texts: list[tuple[Text, Channel | None, int]] = field(default_factory=list)
    whole: bool = True

    @property
    def free(self) -> bool:
        """Whether all of it may be sent."""
        return all(channel is not None and end <= channel.sent for _, channel, end in self.texts)

    def cut(self) -> bool:
        """Keep of each text what may be sent, and nothing of what cannot be cut; whether any text is left."""
        self.whole, left = False, False
        for text, channel, end in self.texts:
            if text.holder is not None:
                sent = 0 if channel is None else channel.sent - (end - len(text.text))
                kept = text.text[: max(0, sent)]
                text.holder[text.name] = kept
                left = left or bool(kept)
        for name in self.choice.keys() & {"logprobs", "finish_reason", "stop_reason"}:
            self.choice[name] = None
        for holder in (self.choice, self.choice.get("delta") or {}, self.choice.get("message") or {}):
            for name in holder.keys() & NUMBERS:
                del holder[name]
        return left


class Choice:
    """One choice with its channels. ``prompt``: what the client sent; ``escaped``: its content is JSON."""

    def __init__(self, guards: GuardSet | None, prompt: Sent, *, escaped: bool = False) -> None:
        self.channels: dict[str, Channel] = {}
        self.blocked: GuardIndex | None = None
        self.ended = False
        self._guards, self._prompt, self._escaped = guards, prompt, escaped
        self._waiting: deque[Part] = deque()
        self._held = 0

    @property
    def done(self) -> Guarded:
        """What the guards did to it."""
        channels = self.channels.values()
        counted = frozenset(name for channel in channels for name in channel.counted)
        return Guarded({}, self.blocked, counted, max((channel.longest for channel in channels), default=0))

    def take(self, part: Part) -> list[Part]:
        """The parts that leave once this one has come; the last of them is cut where the choice is ``blocked``.

        Raises Unguardable.
        """
        if self.blocked is not None:
            return []
        for text in texts_of(part.choice):
            if text.text and self.ended:
                raise Unguardable("a choice goes on after its finish_reason")
            if text.text and self._guards is not None:
                part.texts.append(self._follow(text, self._guards))
        self._waiting.append(part)
        self._held += part.size
        if len(self._waiting) > 1 and self._held > MOST_HELD:
            raise Unguardable(f"more than {MOST_HELD} bytes would have to be held")
        if part.choice.get("finish_reason"):  # some servers write "" where there is none yet
            self.end()
        return self.leaving()

    def end(self) -> None:
        """Nothing more comes; ``leaving`` has what was held."""
        self.ended = True
        for channel in self.channels.values():
            if self.blocked is None:
                channel.end()
                self.blocked = channel.blocked

    def leaving(self) -> list[Part]:
        """The parts that may leave, in order."""
        found: list[Part] = []
        while self._waiting and self._waiting[0].free:
            found.append(self._waiting.popleft())
            self._held -= found[-1].size
        if self.blocked is not None:
            self.ended = True
            found += [part for part in self._waiting if part.cut()]
            self._waiting.clear()
        return found

    def _follow(self, text: Text, guards: GuardSet) -> tuple[Text, Channel | None, int]:
        if self.blocked is not None:
            return text, None, 0
        channel = self.channels.get(text.channel)
        if channel is None:
            if len(self.channels) >= MOST_CHANNELS:
                raise Unguardable(f"a choice has more than {MOST_CHANNELS} texts")
            escaped = self._escaped or text.channel.endswith(f".{ARGUMENTS}")
            channel = self.channels[text.channel] = Channel(guards, self._prompt, escaped=escaped)
        channel.push(text.text)
        self.blocked = channel.blocked
        return text, channel, channel.taken
