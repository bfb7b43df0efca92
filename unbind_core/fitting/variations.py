"""Code as it is met elsewhere: renamed, commented, indented otherwise, from its middle on. What a detector is trained on.

Everything is drawn from a generator of the fit's seed. Evaluation has rewritings of its own, which no fit sees.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

_WORD = re.compile(r"[A-Za-z_]\w*")
# How a comment begins in languages where it is not "//".
_COMMENT = {
    "#": ("python", "ruby", "perl", "shell", "bash", "sh", "r", "yaml", "toml", "make", "julia", "elixir", "php"),
    "--": ("sql", "lua", "haskell", "ada"),
}
_REMARKS = (
    "note",
    "see above",
    "unchanged",
    "checked",
    "todo: tidy",
    "as before",
    "part of the old interface",
    "keep in step with the tests",
    "why this way?",
    "ok",
    "called by the handler below",
)
_SYLLABLES = (
    "ba",
    "co",
    "di",
    "fu",
    "ga",
    "he",
    "jo",
    "ki",
    "lu",
    "mo",
    "na",
    "pe",
    "ri",
    "so",
    "tu",
    "va",
    "we",
    "xi",
)
_UNITS = ("\t", "  ", "        ", "   ", "")
MOST_CROPPED = 0.8  # of a text may be missing in front


def identifiers(text: str, language: str) -> set[str]:
    """The names in a text, as the language's lexer of Pygments sees them; every word, where it has none for the language."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return set(_WORD.findall(text))
    return {value for kind, value in lexer.get_tokens(text) if _is_name(kind) and _WORD.fullmatch(value)}


def _is_name(kind: object) -> bool:
    parts = str(kind).split(".")
    return parts[:2] == ["Token", "Name"] and parts[2:3] != ["Builtin"]


def renamed(text: str, language: str, rng: random.Random) -> str:
    """Some or all identifiers get another name, the same one everywhere."""
    share, ways = rng.choice((0.4, 0.7, 1.0)), rng.choice((range(5), [rng.randrange(5)]))
    names = sorted(identifiers(text, language))
    table = {name: _other_name(name, rng.choice(ways), rng) for name in names if rng.random() < share}
    return _WORD.sub(lambda found: table.get(found[0], found[0]), text)


def _other_name(name: str, way: int, rng: random.Random) -> str:
    def word() -> str:
        return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3)))

    if way == 0:
        return word()
    if way == 1:
        return f"{rng.choice('abcdefghijklmnopqrstuvwxyz')}{rng.randint(0, 99)}"
    if way == 2:
        return rng.choice(("my_", "new_", "the_", "_", "x_")) + name
    if way == 3:
        return name + rng.choice(("_", "2", "_value", "_new", "_v"))
    return "_".join(word() for _ in range(rng.randint(1, 3)))


def recased(text: str, language: str, rng: random.Random) -> str:
    """The letter case of the identifiers, or of the whole text."""
    if rng.random() < 0.3:
        return rng.choice((str.upper, str.lower))(text)
    change = rng.choice((_camel, _snake, str.upper, str.lower, str.capitalize))
    names = identifiers(text, language)
    return _WORD.sub(lambda found: change(found[0]) if found[0] in names else found[0], text)


def _camel(name: str) -> str:
    first, *others = [part for part in name.split("_") if part] or [name]
    return first + "".join(part.capitalize() for part in others) if others else name


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def commented(text: str, language: str, rng: random.Random) -> str:
    """Remarks between the lines and behind them, and blank lines."""
    mark = next((mark for mark, languages in _COMMENT.items() if language.lower() in languages), "//")
    share, found = rng.choice((0.3, 0.6, 1.0)), []
    kinds = rng.choice(((0,), (1,), (2,), (0, 1, 2)))
    for line in text.splitlines(keepends=True):
        found.append(line)
        if not line.endswith("\n") or rng.random() >= share:
            continue
        remark, kind = f"{mark} {' '.join(rng.sample(_REMARKS, rng.choice((1, 1, 2))))}\n", rng.choice(kinds)
        if kind == 0:
            found.append(line[: len(line) - len(line.lstrip())].strip("\n") + remark)
        elif kind == 1:
            found[-1] = line.rstrip("\n") + "  " + remark
        else:
            found.append("\n")
    return "".join(found)


def indented(text: str, _language: str, rng: random.Random) -> str:
    """By tabs, by more or fewer spaces, or not at all."""
    unit = rng.choice(_UNITS)

    def other(found: re.Match[str]) -> str:
        return unit * (len(found[0]) if found[0].startswith("\t") else len(found[0]) // 4)

    return re.sub(r"(?m)^(?:(?: {4})+|\t+)", other, text)


def cropped(text: str, rng: random.Random) -> str:
    """From somewhere in it on: the beginning of a line, or any character."""
    last = int(len(text) * MOST_CROPPED)
    starts = [found.end() for found in re.finditer("\n", text[:last])]
    return text[rng.choice(starts) if starts and rng.random() < 0.5 else rng.randint(0, last) :]


REWRITINGS: tuple[Callable[[str, str, random.Random], str], ...] = (renamed, commented, recased, indented)
