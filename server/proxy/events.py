"""Server-sent events as they come from the other server, each with its bytes; and JSON that can be read in one way alone."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from server.proxy.refusal import Unguardable

MOST_BYTES = 4 * 1024 * 1024  # of one event
MOST_OTHER = 256  # bytes of a line that is no data
DONE = "[DONE]"
_LABELS = ("", "event", "id", "retry")  # "" begins a comment


@dataclass(frozen=True)
class Event:
    """``raw``: its bytes with the blank line that ends it. ``data`` is None where it has none, as a comment. ``beside``: its other
    lines, each by name and value; that of a comment is "".
    """

    raw: bytes
    data: str | None
    beside: tuple[tuple[str, str], ...] = ()


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Event]:
    """The events of a stream, but for one in the middle of which it ends. Raises Unguardable for what is none."""
    rest, lines, size = b"", list[bytes](), 0
    async for chunk in chunks:
        *complete, rest = (rest + chunk if rest else chunk).split(b"\n")
        for line in complete:
            lines.append(line + b"\n")
            size += len(line) + 1
            if line in (b"", b"\r"):
                yield _event(lines)
                lines, size = [], 0
        if size + len(rest) > MOST_BYTES:
            raise Unguardable(f"an event is larger than {MOST_BYTES} bytes")
    if rest:
        lines.append(rest)
    try:
        last = _event(lines)
    except Unguardable:  # it ends in the middle of a line, or of a character
        return
    if lines and last.data in (None, DONE):
        yield last


def _event(lines: list[bytes]) -> Event:
    raw, data, beside = b"".join(lines), list[str](), list[tuple[str, str]]()
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise Unguardable("an event is not UTF-8") from None
    for ended in text.split("\n"):
        line = ended.removesuffix("\r")
        if "\r" in line:
            raise Unguardable("an event has a lone carriage return")
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif name not in _LABELS or len(line) > MOST_OTHER:
            raise Unguardable("a line of the stream is none of server-sent events")
        elif line:
            beside.append((name, value))
    return Event(raw, "\n".join(data) or None, tuple(beside))


def parsed(text: str | bytes) -> dict[str, Any]:
    """A JSON object that can be read in one way alone: no name stands twice in it. Raises Unguardable."""
    try:
        # Of bytes alone json.loads guesses the encoding, and lets halves of surrogate pairs pass.
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise Unguardable("it is not JSON") from None
    if not isinstance(found, dict):
        raise Unguardable("it is no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Unguardable("a name stands twice in one JSON object")
    return found
