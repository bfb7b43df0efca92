"""An answer's text -> what it says and the calls it makes, piece by piece as it streams, however it is cut.

What looks like a call and turns out to be none stays text: nothing that a model writes is lost, but half of a marker behind a call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto

from server.api.inference.tools.formats import ToolFormat
from server.api.inference.tools.objects import Called

LONGEST_HEAD = 512  # characters between what opens a call and its arguments


@dataclass(frozen=True)
class Said:
    """Text."""

    text: str


@dataclass(frozen=True)
class Begun:
    """A call begins; ``index`` counts the calls of an answer."""

    index: int
    name: str


@dataclass(frozen=True)
class Argued:
    """More of the arguments of the call that has begun, as they stand."""

    index: int
    text: str


Event = Said | Begun | Argued


class _State(Enum):
    TEXT = auto()
    OPENED = auto()  # what opens a call has come
    HEAD = auto()  # a name before the arguments
    CALL = auto()
    CLOSED = auto()  # the object of a call has ended


class Reader:
    """Reads one answer. ``functions``: those that there are; ``most``: calls beyond so many are left out."""

    def __init__(self, form: ToolFormat, functions: Collection[str], most: int | None = None) -> None:
        self._form, self._functions, self._most = form, functions, most
        self._state = _State.TEXT
        self._left = ""  # text that has come and was not read
        self._raw = ""  # what came of a call that has no name yet
        self._blank = ""  # white space that is text if text follows
        self._call = Called()
        self._open = False  # the call was begun
        self._first = True  # nothing was said yet
        self._behind = False  # a call has begun, and nothing was said since
        self.calls = 0

    @property
    def within(self) -> bool:
        """Whether the last call that was told has come in part."""
        told = self._open and (self._most is None or self.calls <= self._most)
        return told and self._state is _State.CALL

    def fork(self) -> Reader:
        """Another that has read the same."""
        other = copy(self)
        other._call = copy(self._call)
        return other

    def push(self, text: str) -> list[Event]:
        """What is certain after ``text`` has come."""
        self._left += text
        found: list[Event] = []
        while (step := self._step(found)) is not None:
            self._state = step
        return list(_joined(found))

    def flush(self, *, cut: bool = False) -> list[Event]:
        """What is left at the end of the answer. Right behind a call, of an answer that is ``cut``, that is half of what closes it
        or of another call.
        """
        found: list[Event] = []
        if not (self._state is _State.CALL and self._open) and not (cut and self._behind):
            self._say(self._raw + self._left, found)
        if self._blank and not self.calls:
            found.append(Said(self._blank))
        self._left = self._raw = self._blank = ""
        return list(_joined(found))

    def _step(self, found: list[Event]) -> _State | None:
        """Read on as far as the state lasts; the next state, or None where more text must come."""
        match self._state:
            case _State.TEXT:
                return self._text(found)
            case _State.OPENED:
                return self._opened(found)
            case _State.HEAD:
                return self._head(found)
            case _State.CALL:
                return self._read_call(found)
            case _State.CLOSED:
                return self._closed()

    def _text(self, found: list[Event]) -> _State | None:
        form = self._form
        if form.bare and self._first and (begun := self._left.lstrip()):
            self._first = False
            if begun[0] == "{":
                self._raw = self._left[: -len(begun)]
                self._left = begun
                return self._begins()
        at, marker = min(
            ((place, one) for one in form.markers if (place := self._left.find(one)) >= 0), default=(-1, "")
        )
        if at < 0:
            keep = max((_overlap(self._left, one) for one in form.markers), default=0)
            self._say(self._left[: len(self._left) - keep], found)
            self._left = self._left[len(self._left) - keep :]
            return None
        self._say(self._left[:at], found)
        self._left = self._left[at + len(marker) :]
        if marker not in form.opens:
            return _State.TEXT
        self._raw = marker
        return _State.OPENED

    def _opened(self, found: list[Event]) -> _State | None:
        begun = self._left.lstrip()
        if begun.startswith("[") and "]" in self._form.between:
            begun = begun[1:].lstrip()
        if not begun:
            return None
        if begun[0] == "{":
            self._raw += self._left[: len(self._left) - len(begun)]
            self._left = begun
            return self._begins()
        return _State.HEAD if self._form.name_of is not None else self._no_call(found)

    def _head(self, found: list[Event]) -> _State | None:
        at = self._left.find("{")
        if at < 0 and len(self._left) <= LONGEST_HEAD:
            return None
        assert self._form.name_of is not None
        name = self._form.name_of(self._left[:at]) if at >= 0 else ""
        if not name or not name.isprintable() or at > LONGEST_HEAD:
            return self._no_call(found)
        self._left = self._left[at:]
        self._call = Called(name)
        self._open, self._raw = False, ""
        return _State.CALL

    def _begins(self) -> _State:
        self._call, self._open = Called(), False
        return _State.CALL

    def _read_call(self, found: list[Event]) -> _State | None:
        call, index = self._call, self.calls - 1 if self._open else self.calls
        read = call.take(self._left)
        self._raw += self._left[:read] if not self._open else ""
        self._left = self._left[read:]
        foreign = self._form.bare and call.name is not None and call.name not in self._functions
        if not self._open and call.name is not None and not foreign:
            self._open, self._raw = True, ""
            self.calls += 1
            self._tell(Begun(index, call.name), found)
        if self._open and (text := call.arguments()):
            self._tell(Argued(index, text), found)
        if not self._open and (foreign or call.broken or call.ended):
            return self._no_call(found)
        return _State.CLOSED if call.ended else None

    def _tell(self, event: Begun | Argued, found: list[Event]) -> None:
        self._blank, self._first, self._behind = "", False, True
        if self._most is None or event.index < self._most:
            found.append(event)

    def _closed(self) -> _State | None:
        rest = self._left.lstrip(" \n\t\r" + self._form.between)
        self._left = rest
        if not rest:
            return None
        if rest[0] == "{" and self._form.between:
            return self._begins()
        if (closes := self._form.closes) and closes.startswith(rest[: len(closes)]):
            if len(rest) < len(closes):
                return None
            self._left = rest[len(closes) :]
        return _State.TEXT

    def _no_call(self, found: list[Event]) -> _State:
        """What seemed to open a call is text."""
        said, self._raw = self._raw, ""
        self._say(said, found)
        self._first = False
        return _State.TEXT

    def _say(self, text: str, found: list[Event]) -> None:
        text = self._blank + text
        kept = len(text.rstrip())
        self._blank = text[kept:]
        if kept:
            self._first = self._behind = False
            found.append(Said(text[:kept]))


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may become ``marker``."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _joined(events: list[Event]) -> Iterator[Event]:
    """Neighbours of one kind as one."""
    held: Event | None = None
    for event in events:
        if isinstance(held, Said) and isinstance(event, Said):
            held = Said(held.text + event.text)
        elif isinstance(held, Argued) and isinstance(event, Argued) and held.index == event.index:
            held = Argued(held.index, held.text + event.text)
        else:
            if held is not None:
                yield held
            held = event
    if held is not None:
        yield held
