"""The same code in another writing: comments between, other names, other letters, other indentation, other ends of lines."""

from __future__ import annotations

import builtins
import io
import keyword
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

from unbind_core.rows import ForgetRow

_REMARKS = ("checked above", "as agreed", "see the tests", "kept for callers", "cheap enough", "order matters here")
_WORDS = ("item", "part", "unit", "entry", "piece", "thing", "field", "record", "sample", "handle", "source", "outcome")
_KEPT = {*dir(builtins), *keyword.kwlist, *keyword.softkwlist, "self", "cls"}


def commented(row: ForgetRow) -> list[ForgetRow]:
    """A comment after every line, as far in as the line is."""

    def remarked(text: str) -> str:
        lines = []
        for number, line in enumerate(text.splitlines(keepends=True)):
            lines.append(line)
            if line.endswith("\n"):
                indent = line[: len(line) - len(line.lstrip(" \t"))] if line.strip() else ""
                lines.append(f"{indent}# {_REMARKS[number % len(_REMARKS)]}\n")
        return "".join(lines)

    return [replace(row, prompt=remarked(row.prompt), continuation=remarked(row.continuation))]


def renamed(row: ForgetRow) -> list[ForgetRow]:
    """Every name but attributes, keywords and built-ins is another, the same throughout the row."""
    others: dict[str, str] = {}

    def other(name: str, attribute: bool) -> str:
        if attribute or name in _KEPT:
            return name
        number = len(others)
        again = number // len(_WORDS)
        return others.setdefault(name, _WORDS[number % len(_WORDS)] + (f"_{again}" if again else ""))

    return [_with_names(row, other)]


def recased(row: ForgetRow) -> list[ForgetRow]:
    """Small letters of all names but keywords are capitals, and capitals small."""
    return [_with_names(row, lambda name, _: name if keyword.iskeyword(name) else name.swapcase())]


def reindented(row: ForgetRow) -> list[ForgetRow]:
    """Tabs, and two spaces, for each four spaces at the beginning of a line."""

    def indented(by: str) -> ForgetRow:
        def again(text: str) -> str:
            return re.sub(r"(?m)^(?: {4})+", lambda spaces: by * (len(spaces[0]) // 4), text)

        return replace(row, prompt=again(row.prompt), continuation=again(row.continuation))

    return [indented("\t"), indented("  ")]


def spaced(row: ForgetRow) -> list[ForgetRow]:
    """Two spaces behind every line, an empty line after each, and lines that end as on Windows."""
    return [
        replace(row, prompt=row.prompt.replace("\n", end), continuation=row.continuation.replace("\n", end))
        for end in ("  \n", "\n\n", "\r\n")
    ]


REWRITINGS: dict[str, Callable[[ForgetRow], list[ForgetRow]]] = {
    "comments": commented,
    "renamed": renamed,
    "case": recased,
    "indented": reindented,
    "spaced": spaced,
}


def _with_names(row: ForgetRow, other: Callable[[str, bool], str]) -> ForgetRow:
    """The row with every name that Python's tokenizer finds replaced; ``other`` hears whether it stands behind a dot."""
    text, cut = row.prompt + row.continuation, len(row.prompt)
    written, begun, boundary = "", 0, None
    for name, at, attribute in _names(text):
        if boundary is None and at >= cut:
            written, begun = written + text[begun:cut], cut
            boundary = len(written)
        written += text[begun:at] + other(name, attribute)
        begun = at + len(name)
    if boundary is None:
        written, begun = written + text[begun:cut], cut
        boundary = len(written)
    written += text[begun:]
    return replace(row, prompt=written[:boundary], continuation=written[boundary:])


def _names(text: str) -> Iterator[tuple[str, int, bool]]:
    """(name, offset, whether behind a dot) of the names of a text, as far as it can be read as Python."""
    starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
    previous = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.string, starts[token.start[0] - 1] + token.start[1], previous == "."
            previous = token.string
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return  # a row may break off anywhere; what was read before counts
