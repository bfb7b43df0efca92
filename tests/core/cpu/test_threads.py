"""The number of threads a pass is given: what was quicker, tried again from time to time, and always put back."""

from __future__ import annotations

import pytest
import torch

from unbind_core.cpu import threads
from unbind_core.cpu.threads import AGAIN, LONG, TRIED, ThreadChoice

CPU = torch.device("cpu")


class Passes:
    """Passes that take as long as is said for one thread and for all, by a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, all_threads: int = 4) -> None:
        self.now, self.count = 0.0, all_threads
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.count)
        monkeypatch.setattr(torch, "set_num_threads", self._set)
        self.choice = ThreadChoice(CPU)

    def _set(self, count: int) -> None:
        self.count = count

    def run(self, tokens: int, one: float, every: float, length: int = 100) -> int:
        with self.choice(tokens, length):
            used = self.count
            self.now += one if used == 1 else every
        assert self.count == 4
        return used


@pytest.mark.parametrize(("one", "every", "best"), [(0.01, 0.02, 1), (0.02, 0.01, 4)])
def test_the_quicker_number_is_used_nearly_always(
    monkeypatch: pytest.MonkeyPatch, one: float, every: float, best: int
) -> None:
    passes = Passes(monkeypatch)
    used = [passes.run(8, one, every) for _ in range(4 * AGAIN)]
    assert used[: 2 * TRIED] == [4] * TRIED + [1] * TRIED
    assert used[2 * TRIED :].count(best) >= 4 * AGAIN - 2 * TRIED - 4
    assert {1, 4} == set(used[2 * TRIED :])  # the other one is looked at again


def test_a_choice_follows_what_the_machine_has_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    for _ in range(20):
        passes.run(8, 0.02, 0.01)
    used = [passes.run(8, 0.02, 0.04) for _ in range(8 * AGAIN)]  # another process came
    assert used[-AGAIN:].count(1) >= AGAIN - 2


def test_one_interrupted_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    for _ in range(20):
        passes.run(8, 0.01, 0.02)
    passes.run(8, 3.0, 3.0)
    assert [passes.run(8, 0.01, 0.02) for _ in range(5)] == [1] * 5


def test_long_passes_are_never_left_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    assert {passes.run(512, 9.0, 2 * LONG) for _ in range(3 * AGAIN)} == {4}


def test_sizes_are_judged_apart_and_a_failed_pass_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    for _ in range(20):
        assert passes.run(8, 0.01, 0.02) and passes.run(64, 0.03, 0.02)
    assert (passes.run(8, 0.01, 0.02), passes.run(64, 0.03, 0.02)) == (1, 4)
    with pytest.raises(RuntimeError), passes.choice(8, 100):
        raise RuntimeError("out of memory")
    assert passes.count == 4 and passes.run(8, 0.01, 0.02) == 1


def test_with_one_thread_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("it was set"))
    with ThreadChoice(CPU)(8, 100):
        pass
