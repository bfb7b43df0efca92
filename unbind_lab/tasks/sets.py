"""Two sets of executable tasks: finish the last line of a body, finish a line within one. Small everyday Python, as HumanEval+ is
beyond micro models; and as they end next to no body rightly, the line that is asked for is begun.

Each task has base tests and extended ones, expressions whose values under the solution are what is right; the extended ones ask for
what a solution that only looks right gets wrong.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any


@dataclass(frozen=True)
class Task:
    """``prompt`` + ``solution`` + ``after`` is a program; ``base`` and ``extended`` are expressions in it."""

    name: str
    prompt: str
    solution: str
    after: str
    base: tuple[str, ...]
    extended: tuple[str, ...]

    def program(self, written: str) -> str:
        """With what was ``written`` in the place of the solution."""
        return self.prompt + written + self.after


def _read(name: str) -> tuple[Task, ...]:
    """The tasks of a file beside this one: of each family, one a line of its words."""
    data = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    return tuple(task for family in data["family"] for task in _made(family, data["words"][family["words"]]))


def _made(family: Mapping[str, Any], words: Mapping[str, Any]) -> Iterator[Task]:
    for number, line in enumerate(words["lines"]):
        given = dict(zip(words["names"].split(), line.split(), strict=True))
        texts = {key: Template(family.get(key, "")).substitute(given) for key in ("prompt", "solution", "after")}
        tests = {key: tuple(Template(one).substitute(given) for one in family[key]) for key in ("base", "extended")}
        yield Task(f"{family['name']}/{number}", **texts, **tests)  # type: ignore[arg-type]


LAST_LINE, WITHIN = "last line", "line within"
SETS: dict[str, tuple[Task, ...]] = {LAST_LINE: _read("last_line"), WITHIN: _read("line_within")}


def answer(text: str) -> str:
    """What counts of a completion, which goes on in a line that is begun: that line."""
    return text.split("\n", 1)[0] + "\n"
