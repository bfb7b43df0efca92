"""The user's files are read where they are the released ones, and inputs have the types that the tasks are written for."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from unbind_core.errors import UnbindError
from unbind_lab.evalplus.inputs import FORMS, deserialised
from unbind_lab.evalplus.problems import HUMAN_EVAL, MBPP, RELEASES, digests, read


def test_tasks_are_read_packed_or_not(written: Callable[..., Path]) -> None:
    folder = written()
    packed = read(folder)
    assert [one.name for one in packed[HUMAN_EVAL]] == ["HumanEval/900", "HumanEval/901"]
    assert packed[MBPP][0].base == [[(3, 4, 5), (5, 7, 4)]] and packed[MBPP][1].plus == [[-4], [10**9]]
    for file in folder.glob("*.gz"):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert read(folder) == packed
    assert digests(folder) == [RELEASES[kind].sha256 for kind in (HUMAN_EVAL, MBPP)]


def test_what_is_wrong_with_files_is_said(written: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(
        UnbindError, match=r"--evalplus FOLDER, a folder that holds HumanEvalPlus-v0.1.10.jsonl.gz \(https"
    ):
        digests(None)
    with pytest.raises(UnbindError, match=r"holds no HumanEvalPlus-v0.1.10.jsonl.gz; fetch it from https://.*v0.1.10 "):
        digests(tmp_path)
    folder = written()
    path = folder / "MbppPlus-v0.2.0.jsonl.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"{}\n"))
    with pytest.raises(
        UnbindError, match=r"holds 3 tasks and is not the released file, which has 2 and another SHA-256"
    ):
        read(folder)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UnbindError, match=r"MbppPlus-v0.2.0.jsonl.gz cannot be read .* fetch it again from https"):
        read(folder)


def test_the_released_files_are_the_paper_s() -> None:
    assert [(one.name, one.tasks) for one in RELEASES.values()] == [
        ("HumanEvalPlus-v0.1.10", 164),
        ("MbppPlus-v0.2.0", 378),
    ]


@pytest.mark.parametrize(
    ("number", "given", "wanted"),
    [
        (2, [[1], [2]], [(1,), (2,)]),
        (63, [[[1, 2]]], [[(1, 2)]]),
        (259, [[[1, 2]], [[3]]], [((1, 2),), ((3,),)]),
        (75, [[[1, 2]], 3], [[(1, 2)], 3]),
        (307, [[1], 2, 3], [(1,), 2, 3]),
        (106, [[1], [2]], [[1], (2,)]),
        (115, [[[1, 2], [], {"a": 1}]], [[{1, 2}, {}, {}]]),
        (278, [[1, [2, 3]]], [(1, (2, 3))]),
        (722, [{"a": [1, 2]}, 3, 4], [{"a": (1, 2)}, 3, 4]),
        (580, [[1, [2, [3]]]], ((1, (2, (3,))),)),
        (124, ["2", "1j"], [2.0, 1j]),
        (252, ["(1+2j)"], [1 + 2j]),
        (3, [[1]], [[1]]),
    ],
)
def test_inputs_have_their_types(number: int, given: list[object], wanted: object) -> None:
    assert list(deserialised(f"Mbpp/{number}", [given])[0]) == list(wanted)  # type: ignore[call-overload]
    assert repr(list(deserialised(f"Mbpp/{number}", [given])[0])) == repr(list(wanted))  # type: ignore[call-overload]


def test_no_task_has_two_forms() -> None:
    numbers = [number for _, numbers in FORMS for number in numbers]
    assert len(numbers) == len(set(numbers))
