"""The tasks of HumanEval+ and MBPP+, read from the files that EvalPlus releases. The user has them; they are not shipped."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from unbind_core.errors import UnbindError
from unbind_lab.evalplus.inputs import deserialised

HUMAN_EVAL, MBPP = "he_plus", "mbpp_plus"


@dataclass(frozen=True)
class Release:
    """A file as it was released: ``name`` without its ending, how many ``tasks``, the SHA-256 of its text, where it lies."""

    name: str
    tasks: int
    sha256: str
    where: str

    def path(self, folder: Path) -> Path:
        """The file in ``folder``, packed or not. Raises UnbindError where there is none."""
        packed, plain = folder / f"{self.name}.jsonl.gz", folder / f"{self.name}.jsonl"
        for path in (packed, plain):
            if path.is_file():
                return path
        raise UnbindError(
            f"--evalplus: {folder} holds no {packed.name}; fetch it from {self.where} (as {self.name.split('-')[0]}.jsonl.gz) "
            f"and save it there as {packed.name}"
        )


_HOST = "https://github.com/evalplus"
RELEASES = {
    HUMAN_EVAL: Release(
        "HumanEvalPlus-v0.1.10",
        164,
        "42526ec0e7d5f3ee0b06d6ced98f8c8bae3d76519151bfb3d36f79010645bd7f",
        f"{_HOST}/humanevalplus_release/releases/tag/v0.1.10",
    ),
    MBPP: Release(
        "MbppPlus-v0.2.0",
        378,
        "b54e762755248ca411b523c917fa9f93c07b5ff2966bf60b3917b853926a3dad",
        f"{_HOST}/mbppplus_release/releases/tag/v0.2.0",
    ),
}


@dataclass(frozen=True)
class Problem:
    """``prompt`` + ``solution`` is a program with the function ``entry``; an input is a sequence of arguments; ``atol`` is the
    absolute tolerance of floats, 0 for none that the file names.
    """

    kind: str
    name: str
    prompt: str
    solution: str
    entry: str
    base: Sequence[Sequence[Any]]
    plus: Sequence[Sequence[Any]]
    atol: float


def read(folder: Path) -> dict[str, tuple[Problem, ...]]:
    """The tasks by set, the same objects for the same files. Raises UnbindError where one is not there or not the released one."""
    return {kind: _parsed(kind, _text(kind, folder)) for kind in RELEASES}


def digests(folder: Path | None) -> list[str]:
    """SHA-256 of the text of each file, which are the released ones. Raises UnbindError as ``read`` does, and for no folder."""
    if folder is None:
        names = " and ".join(f"{release.name}.jsonl.gz ({release.where})" for release in RELEASES.values())
        raise UnbindError(f"--evalplus: the protocol evalplus needs --evalplus FOLDER, a folder that holds {names}")
    return [hashlib.sha256(_text(kind, folder)).hexdigest() for kind in RELEASES]


def _text(kind: str, folder: Path) -> bytes:
    release = RELEASES[kind]
    path = release.path(folder)
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise UnbindError(f"--evalplus: {path} cannot be read ({error}); fetch it again from {release.where}") from None
    if hashlib.sha256(text).hexdigest() != release.sha256:
        raise UnbindError(
            f"--evalplus: {path} holds {len(text.splitlines())} tasks and is not the released file, which has {release.tasks} "
            f"and another SHA-256; fetch it again from {release.where}"
        )
    return text


@cache
def _parsed(kind: str, text: bytes) -> tuple[Problem, ...]:
    found = []
    for line in text.splitlines():
        task = json.loads(line)
        base, plus = task["base_input"], task["plus_input"]
        if kind == MBPP:
            base, plus = (deserialised(task["task_id"], inputs) for inputs in (base, plus))
        found.append(
            Problem(
                kind,
                task["task_id"],
                task["prompt"],
                task["canonical_solution"],
                task["entry_point"],
                base,
                plus,
                task["atol"],
            )
        )
    return tuple(found)
