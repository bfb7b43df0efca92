"""The benchmark of the processor's devices: each is set against all of them, and the engines take turns."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from server.bench.cpu import WITHOUT, Checkpoint, alternate, gain, run
from unbind_core.errors import UnbindError
from unbind_core.progress import silent


def test_engines_take_turns_and_the_first_round_warms_up() -> None:
    turns: list[str] = []

    def system(name: str) -> float:
        turns.append(name)
        return float(len(turns))

    rounds: list[int] = []
    seconds = alternate({name: lambda name=name: system(name) for name in ("a", "b", "c")}, 4, rounds.append)
    assert rounds == [1, 2, 3, 4, 5]
    assert all(sorted(turns[i : i + 3]) == ["a", "b", "c"] for i in range(0, 15, 3))
    assert sorted(chain.from_iterable(seconds.values())) == [float(turn) for turn in range(4, 16)]


def test_a_gain_is_time_without_over_time_with() -> None:
    assert gain([2.0, 3.0, 8.0], [1.0, 2.0, 2.0]) == {"median": 2.0, "of_minima": 2.0}


@pytest.mark.parametrize("workload", ["3x6", "0x6->4"])
def test_a_workload_that_is_none_is_refused(checkpoint: Path, workload: str) -> None:
    with pytest.raises(UnbindError, match="REQUESTSxPROMPT->NEW"):
        run(Checkpoint(checkpoint), workloads=(workload,), progress=silent)


@pytest.mark.slow
def test_every_device_is_measured_alone(checkpoint: Path) -> None:
    figures = run(Checkpoint(checkpoint), workloads=("3x6->4",), repeats=1, progress=silent)
    found = figures["workloads"]["3x6->4"]
    assert set(found["gain"]) == {*WITHOUT, "allocator"}
    assert found["seconds"] > 0 and all(ratio > 0 for gains in found["gain"].values() for ratio in gains.values())
