"""HumanEval+ and MBPP+ of a few tasks of our own, in the files' own form."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbind_lab.evalplus.problems import HUMAN_EVAL, MBPP, RELEASES

Line = dict[str, Any]


def task(
    name: str, prompt: str, solution: str, entry: str, base: Sequence[Any], plus: Sequence[Any], atol: float = 0
) -> Line:
    """A line of a file, with the keys that are read and those that are not."""
    return {
        "task_id": name,
        "prompt": prompt,
        "entry_point": entry,
        "canonical_solution": solution,
        "base_input": base,
        "plus_input": plus,
        "atol": atol,
        "contract": "",
        "test": "",
    }


HUMAN_EVALS = [
    task(
        "HumanEval/900",
        'def halves(numbers):\n    """Half of each number."""\n',
        "    return [n / 2 for n in numbers]\n",
        "halves",
        [[[1, 2]], [[]]],
        [[[3, 5, 1e9]]],
    ),
    task(
        "HumanEval/901",
        'def longest(words):\n    """The longest word, None of none."""\n',
        "    return max(words, key=len) if words else None\n",
        "longest",
        [[["a", "bb"]]],
        [[[]], [["ab", "cd"]]],
    ),
]
MBPPS = [
    task(
        "Mbpp/2",
        '"""\nWrite a function to find the shared elements of two lists.\n"""\n',
        "\ndef similar_elements(a, b):\n    return tuple(set(a) & set(b))\n",
        "similar_elements",
        [[[3, 4, 5], [5, 7, 4]]],
        [[[], [1]]],
    ),
    task(
        "Mbpp/901",
        '"""\nWrite a function to square a number.\n"""\n',
        "\ndef square(n):\n    return n * n\n",
        "square",
        [[2], [3]],
        [[-4], [10**9]],
    ),
]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the files of some tasks, and has them be the released ones."""

    def write(human: Sequence[Line] = HUMAN_EVALS, mbpp: Sequence[Line] = MBPPS) -> Path:
        folder = tmp_path / "evalplus"
        folder.mkdir(exist_ok=True)
        for kind, lines in ((HUMAN_EVAL, human), (MBPP, mbpp)):
            text = "".join(json.dumps(line) + "\n" for line in lines).encode()
            release = replace(RELEASES[kind], tasks=len(lines), sha256=hashlib.sha256(text).hexdigest())
            (folder / f"{release.name}.jsonl.gz").write_bytes(gzip.compress(text))
            monkeypatch.setitem(RELEASES, kind, release)
        return folder

    return write
