"""Gates that are open whatever their detectors say: there and nowhere else, for whoever asks, and remembered by nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.applying.test_gates import LAYER, MODEL, module, states
from tests.core.conftest import make_module, select
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gates import decided
from unbind_core.applying.passes import END, Forced, Pass, Record, where_forced
from unbind_core.module import UnbindModule

NEVER = {"s_ref": 0.0, "tau": 1e6, "tau_close": None}
MODULES = {
    "n": replace(module("n"), **NEVER),
    "m": replace(module("m", seed=1, heads=1, window=9), **NEVER),
    "p": make_module(MODEL, "p", LAYER, seed=3, s_ref=0.0, tau=1e6, kappa=2.0),
}
EVERY = dict.fromkeys(MODULES, 1.0)


def bank_of(summed: int) -> ModuleBank:
    bank = ModuleBank(summed_columns=summed)
    for one in MODULES.values():
        bank.add(one)
    return bank


def edited(bank: ModuleBank, here: Tensor, *rows: dict[str, float], **of_pass: object) -> tuple[Tensor, Record]:
    record: Record = []
    pass_ = Pass(record=record, **of_pass)  # type: ignore[arg-type]
    return select(bank, *rows).edit(LAYER, here, pass_).states, record


def by_name(record: Record) -> dict[str, Tensor]:
    return {name: table[..., i] for names, table in record for i, name in enumerate(names)}


@pytest.mark.parametrize("summed", [10**9, 0], ids=["running sums", "kept states"])
def test_a_forced_gate_is_open_there_as_at_its_threshold_and_nowhere_else(summed: int) -> None:
    here, bank = states(2, 12, seed=4), bank_of(summed)
    spans = [
        (0, 0, 12, [Forced("n", 3, 7), Forced("p", 5, 6)]),
        (1, 0, 12, [Forced("m", 0, 2), Forced("n", 11, END), Forced("m", 12, 20)]),
    ]
    forced, eased = where_forced(spans, torch.arange(12).expand(2, 12))
    assert forced is not None and eased is None
    opened: list[Tensor] = []
    found, record = edited(bank, here, EVERY, forced=forced, opened=opened)
    plain, shut = edited(bank, here, EVERY)
    assert torch.equal(plain, here) and not any(table.any() for table in by_name(shut).values())
    told = by_name(record)
    for name, one in MODULES.items():
        assert torch.equal(told[name] != 0, forced[name])
        assert set(told[name][forced[name]].tolist()) == {one.tau if name == "p" else 1.0}
    anywhere = forced["n"] | forced["m"] | forced["p"]
    assert torch.equal((found != here).any(-1), anywhere)
    assert torch.equal(torch.stack(opened).any(0), anywhere)
    # what an open gate does: once where it is at its threshold
    for name in ("n", "m"):
        alone, _ = edited(bank, here, {name: 1.0}, forced={name: forced[name]})
        one = replace(MODULES[name], s_ref=-1e6, tau=1e-3)  # open everywhere
        other = ModuleBank()
        other.add(one)
        always = select(other, {name: 1.0}).edit(LAYER, here).states
        torch.testing.assert_close(alone, torch.where(forced[name][..., None], always, here))
    counted = {name: counts["prefill"] for name, counts in bank.counts().items()}
    assert counted["p"][1] == int(forced["p"].sum())


def test_strengths_hold_and_others_of_the_batch_see_nothing_of_it() -> None:
    here, bank = states(3, 6, seed=5), bank_of(10**9)
    forced, _ = where_forced([(1, 0, 6, [Forced("n", 0, 6)])], torch.arange(6).expand(3, 6))
    whole, half = {"n": 1.0, "m": 1.0}, {"n": 0.5}
    found, _ = edited(bank, here, whole, half, {}, forced=forced)
    assert torch.equal(found[0], here[0]) and torch.equal(found[2], here[2])
    full, _ = edited(bank, here, {}, {"n": 1.0}, {}, forced=forced)
    torch.testing.assert_close(found[1] - here[1], (full[1] - here[1]) / 2, atol=1e-5, rtol=1e-4)
    opened: list[Tensor] = []
    edited(bank, here, {"n": 0.0}, {"n": 0.0}, {}, forced=forced, opened=opened)  # measured alone
    assert not torch.stack(opened).any()


def test_where_they_are_in_a_flat_pass_is_by_the_sequences_parts() -> None:
    positions = torch.tensor([4, 5, 6, 0, 1, 9])
    spans = [Forced("a", 5, 7), Forced("b", 6, 9, eased=True)]
    found, eased = where_forced([(slice(0, 3), 4, 3, spans), (slice(5, 6), 9, 1, [Forced("a", 0, 9)])], positions)
    assert found is not None and found["a"].tolist() == [False, True, True, False, False, False]
    assert eased is not None and eased["b"].tolist() == [False, False, True, False, False, False]
    assert where_forced([], positions) == (None, None)


class _Operations(TorchDispatchMode):
    """Counts what is asked of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_gates_of_a_thousand_modules_are_forced_by_as_many_operations_as_that_of_one() -> None:
    """Where all protect what many texts begin with, each span of each would be one."""
    counts, positions = [], torch.arange(512).expand(2, 512)
    for number in (1, 1000):
        spans = [
            Forced(f"m{i}", start, start + 33 + i % 5, bool(i % 2))
            for start in range(0, 600, 40)
            for i in range(number)
        ]
        with _Operations() as operations:
            found = where_forced([(1, 0, 512, spans)], positions)
        counts.append(operations.count)
        for eased, named in enumerate(found):
            for name, where in (named or {}).items():
                begins = torch.tensor([one.start for one in spans if one.name == name])[:, None]
                length = 33 + int(name[1:]) % 5
                assert int(name[1:]) % 2 == eased and not where[0].any()
                expected = (positions[1] >= begins) & (positions[1] < begins + length)
                assert torch.equal(where[1], expected.any(0))
        assert sum(len(named or ()) for named in found) == number
    assert counts[1] <= 2 * counts[0]


@pytest.mark.parametrize("summed", [10**9, 0], ids=["running sums", "kept states"])
@pytest.mark.parametrize("hold", [None, 6], ids=["one window", "held"])
@pytest.mark.parametrize(("low", "first"), [(0.25, 0), (0.0, 3), (0.0, 20)])
def test_an_eased_gate_opens_where_it_would_else_have_closed(
    summed: int, hold: int | None, low: float, first: int
) -> None:
    """At the lower of its thresholds, there alone, and closes as one that opened by itself."""
    one, here = module("n", heads=1, window=3), states(6, 24, seed=9)
    scores = _scores(one, here)
    tau = float(scores.std())
    one = replace(one, s_ref=float(scores.mean()), tau=tau, tau_close=low * tau, hold=hold, first=first)
    bank = ModuleBank(summed_columns=summed)
    bank.add(one)
    tables: list[Tensor] = []
    positions = torch.arange(24).expand(6, 24)
    spans = [(row, 0, 24, [Forced("n", 4, 12, eased=True)]) for row in range(5)]
    for told in ([], spans):
        forced, eased = where_forced(told, positions)
        edited(bank, here, {"n": 1.0}, forced=forced, eased=eased, opened=tables)
    plain, found = tables
    e = _means(one, here)
    expected = plain.clone()
    for row in range(5):
        was = False
        for t in range(24):
            longer = _means(one, here, hold)[row, t] if hold else e[row, t]
            opens = e[row, t] >= (low if 4 <= t < 12 else 1.0)
            was = bool(opens or (was and max(e[row, t], longer) >= low))
            expected[row, t] = was
    assert torch.equal(found, expected) and torch.equal(found[5], plain[5])
    assert int((found & ~plain).sum()) > 4 and not bool((plain & ~found).any())
    later = found[:, 12:] & ~plain[:, 12:]
    assert bool(later.any())  # it stays open behind the stretch, as long as its scores say so


def _scores(one: UnbindModule, here: Tensor) -> Tensor:
    tensors = one.tensors
    return (here @ tensors["w"].T + tensors["b"]).relu() @ tensors["heads"].T + tensors["heads_b"]


def _means(one: UnbindModule, here: Tensor, window: int | None = None) -> Tensor:
    means = (decided(row, one.s_ref, one.tau, window or one.window, one.first, one.least) for row in _scores(one, here))
    return torch.stack(list(means))
