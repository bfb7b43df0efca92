"""The bank's arithmetic: the paper's gate and update, for any mix of modules, counted without altering anything."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.conftest import bank_of, edit, make_module, select
from unbind_core.applying import bank as bank_module
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gates import FisherGates
from unbind_core.errors import ModelMismatch, UnbindError, UnknownModule
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.running.device import SHARED, threads_for

D = 24
MODEL = ModelIdentity("f" * 64, "tiny", D, 4)


def module(name: str = "a", layer: int = 1, seed: int = 0, **changes: Any) -> UnbindModule:
    return make_module(MODEL, name, layer, seed=seed, **changes)


def states(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_hand(h: Tensor, modules: list[tuple[UnbindModule, float]]) -> Tensor:
    """The update of one state [d] in FP64, module by module, straight from the paper."""
    total = torch.zeros(D, dtype=torch.float64)
    for one, strength in modules:
        a = max(float(one.w.double() @ h.double()) - one.s_ref, 0.0)
        if a >= one.tau:
            total += one.kappa * strength * a * one.v.double()
    return h.double() - total


def axis(index: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(index), D).float()


def test_the_gate_opens_at_the_threshold_itself() -> None:
    one = module(w=axis(0) * 2, v=axis(1), s_ref=1.0, tau=3.0, kappa=2.0)
    below, exactly = 2.0 - 2**-20, 2.0
    h = torch.zeros(1, 3, D)
    h[0, :, 0] = torch.tensor([below, exactly, 5.0])
    edited = edit(select(bank_of(one), {"a": 1.0}), 1, h)
    assert edited[0, :, 1].tolist() == [0.0, -6.0, -18.0]
    assert torch.equal(edited[0, :, 0], h[0, :, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{"kappa": 0.0}, {}])
def test_no_strength_changes_no_bit(dtype: torch.dtype, changes: dict[str, float]) -> None:
    bank = bank_of(module(**changes))
    h = states(3, 5, dtype=dtype)
    strength = 1.0 if changes else 0.0
    assert torch.equal(edit(select(bank, {"a": strength}), 1, h), h)
    assert torch.equal(edit(select(bank, {"a": strength}, {}, {"a": strength}), 1, h), h)
    assert bank.counts()["a"]["prefill"][1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mixed_batch_agrees_with_the_formula_state_by_state(dtype: torch.dtype) -> None:
    modules = [module(name, seed=i, s_ref=0.1 * i, tau=0.3) for i, name in enumerate("abc")]
    wanted = [{"a": 1.0}, {}, {"b": 0.5, "c": 2.0}, {"a": 1.0, "b": 1.0, "c": 1.0}]
    h = states(4, 6, dtype=dtype)
    edited = edit(select(bank_of(*modules), *wanted), 1, h)
    assert edited.dtype == dtype and edited.shape == h.shape
    for row, names in enumerate(wanted):
        for t in range(6):
            expected = by_hand(h[row, t], [(m, names[m.name]) for m in modules if m.name in names])
            limit = 0.05 if dtype is torch.bfloat16 else 1e-5
            assert torch.allclose(edited[row, t].double(), expected, atol=limit, rtol=0.01 if limit > 0.01 else 1e-5)


def test_rows_name_the_selection_row_of_each_state_or_sequence() -> None:
    bank = bank_of(module("a"), module("b", seed=1))
    selection = select(bank, {"a": 1.0}, {}, {"b": 2.0})
    h = states(3, 4)
    plain = edit(selection, 1, h)
    order = torch.tensor([2, 0, 1])
    assert torch.allclose(edit(selection, 1, h[order], rows=order), plain[order])
    flat = edit(selection, 1, h.reshape(12, D), rows=torch.arange(3).repeat_interleave(4))
    assert torch.allclose(flat.view(3, 4, D), plain)


def test_a_row_without_modules_keeps_every_bit() -> None:
    bank = bank_of(module("a", kappa=1e4), module("b", seed=1))
    h = states(4, 5)
    edited = edit(select(bank, {"a": 1.0}, {}, {"b": 1.0}, {}), 1, h)
    assert torch.equal(edited[1], h[1]) and torch.equal(edited[3], h[3])
    assert not torch.equal(edited[0], h[0])


def test_a_row_without_modules_is_not_harmed_by_overflowing_states() -> None:
    bank = bank_of(module("a", w=axis(0), v=axis(1)))
    h = states(2, 3)
    h[1, 1, 0] = float("inf")
    edited = edit(select(bank, {"a": 1.0}, {}), 1, h)
    assert torch.equal(edited[1], h[1])


def test_the_input_is_left_as_it_was() -> None:
    h = states(2, 3)
    before = h.clone()
    edit(select(bank_of(module()), {"a": 1.0}), 1, h)
    assert torch.equal(h, before)


def test_the_order_of_adding_does_not_matter() -> None:
    first, second = module("a", kappa=9.0), module("b", seed=1, kappa=5.0)
    h = states(2, 8)
    both = {"a": 1.0, "b": 1.0}
    one = edit(select(bank_of(first, second), both, both), 1, h)
    other = edit(select(bank_of(second, first), both, both), 1, h)
    assert torch.equal(one, other)


def test_every_module_of_a_layer_reads_the_unmodified_states() -> None:
    """The second one's gate would open only if it saw the first one's correction."""
    first = module("a", w=axis(0), v=-axis(1), tau=1.0, kappa=10.0)
    second = module("b", w=axis(1), v=axis(2), tau=1.0, kappa=10.0)
    h = axis(0).view(1, 1, D) * 2
    edited = edit(select(bank_of(first, second), {"a": 1.0, "b": 1.0}), 1, h)
    assert edited[0, 0, :3].tolist() == [2.0, 20.0, 0.0]


@pytest.mark.parametrize("others", [[], [{}]])
def test_the_update_is_linear_in_the_strength(others: list[dict[str, float]]) -> None:
    bank = bank_of(module(s_ref=0.2, tau=0.1))
    h = states(1 + len(others), 6)
    unit = h - edit(select(bank, {"a": 1.0}, *others), 1, h)
    for strength in (0.25, 2.0, 3.5):
        scaled = h - edit(select(bank, {"a": strength}, *others), 1, h)
        assert torch.allclose(scaled, strength * unit, atol=1e-5)


def test_one_selection_row_serves_a_batch_of_any_size() -> None:
    bank = bank_of(module())
    h = states(5, 3)
    assert torch.allclose(edit(select(bank, {"a": 1.0}), 1, h), edit(select(bank, *[{"a": 1.0}] * 5), 1, h))


def test_a_batch_of_another_size_is_refused() -> None:
    with pytest.raises(UnbindError, match="3 rows, the batch 2"):
        edit(select(bank_of(module()), {"a": 1.0}, {}, {}), 1, states(2, 3))


def test_only_layers_somebody_asked_for_are_in_a_selection() -> None:
    bank = bank_of(module("a", 1), module("b", 3, seed=1))
    assert select(bank, {"a": 1.0}, {}).layers == {1}
    assert select(bank, {"a": 1.0}, {"b": 1.0}).layers == {1, 3}
    assert bank.select([{}, {}]) is None
    assert bank.select([]) is None


def test_an_equal_question_gets_the_same_selection_until_the_bank_changes() -> None:
    bank = bank_of(module("a"), module("b", 2, seed=1))
    before = bank.select([{"a": 1.0, "b": 2.0}, {}])
    assert bank.select([{"b": 2.0, "a": 1.0}, {}]) is before
    bank.remove("b")
    with pytest.raises(UnknownModule):
        bank.select([{"a": 1.0, "b": 2.0}, {}])
    assert bank.select([{"a": 1.0}, {}]) is not before


def test_a_selection_in_use_outlives_its_modules() -> None:
    bank = bank_of(module("a"), module("b", seed=1))
    h = states(2, 4)
    selection = select(bank, {"a": 1.0}, {"a": 1.0, "b": 1.0})
    before = edit(selection, 1, h)
    bank.remove("a")
    bank.add(module("b", seed=5))
    for i in range(80):  # past the size of the first counter table
        bank.add(module(f"extra{i}", seed=i))
    assert torch.equal(edit(selection, 1, h), before)
    assert bank.counts()["a"]["prefill"][0] == 16
    assert "a" not in bank and "b" in bank and len(bank) == 81


def test_an_unknown_name_is_refused_with_near_ones() -> None:
    bank = bank_of(module("quicksort"), module("heapsort", seed=1))
    with pytest.raises(UnknownModule, match="'quiksort'; did you mean quicksort"):
        bank.select([{"quiksort": 1.0}])
    with pytest.raises(UnknownModule):
        bank.remove("quiksort")
    with pytest.raises(UnknownModule, match="bank is empty"):
        ModuleBank()["a"]


@pytest.mark.parametrize("strength", [-1.0, float("nan"), float("inf")])
def test_a_strength_that_makes_no_sense_is_refused(strength: float) -> None:
    with pytest.raises(UnbindError, match="strength of module 'a'"):
        bank_of(module()).select([{"a": strength}])


def test_modules_of_two_models_do_not_share_a_bank() -> None:
    other = ModelIdentity("e" * 64, "other", D, 4)
    with pytest.raises(ModelMismatch):
        bank_of(module("a"), make_module(other, "b"))


def test_the_bank_may_change_while_another_thread_selects_and_edits() -> None:
    bank = bank_of(module("a"))
    h = states(2, 4)
    expected = edit(select(bank, {"a": 1.0}, {}), 1, h)
    stop = threading.Event()

    def churn() -> None:
        i = 0
        while not stop.is_set():
            bank.add(module(f"m{i % 5}", i % 4, seed=i))
            i += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(200):
            assert torch.allclose(edit(select(bank, {"a": 1.0}, {}), 1, h), expected)
    finally:
        stop.set()
        thread.join()
    assert bank.counts()["a"]["prefill"][0] == 201 * 4


def test_a_bank_filled_in_inference_mode_serves_outside_it() -> None:
    bank = bank_of(module("a"))
    with torch.inference_mode():
        for i in range(80):
            bank.add(module(f"m{i}", seed=i))
        selection = select(bank, {"a": 1.0, "m79": 1.0}, {})
        inside = edit(selection, 1, states(2, 3))
    assert torch.equal(edit(selection, 1, states(2, 3).requires_grad_(True)), inside)
    assert bank.counts()["m79"]["prefill"][0] == 6


@pytest.mark.parametrize("rows", [[{"a": 1.0}], [{"a": 1.0}, {}]])
def test_an_edit_can_be_differentiated(rows: list[dict[str, float]]) -> None:
    one = module("a", w=axis(0), v=axis(1), tau=0.5, kappa=3.0)
    h = torch.zeros(len(rows), 1, D)
    h[0, 0, 0] = 2.0
    h.requires_grad_(True)
    edit(select(bank_of(one), *rows), 1, h)[0, 0, 1].backward()
    assert h.grad is not None
    assert h.grad[0, 0, :3].tolist() == [-3.0, 1.0, 0.0]


def test_little_work_on_a_cpu_takes_one_thread_and_the_number_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    decide = FisherGates.__call__

    def watching(self: FisherGates, *args: Any) -> tuple[Tensor, Tensor]:
        seen.append(torch.get_num_threads())
        if len(seen) == 3:
            raise RuntimeError("no memory")
        return decide(self, *args)

    monkeypatch.setattr(FisherGates, "__call__", watching)
    names = [f"m{i}" for i in range(64)]
    selection = select(bank_of(*(module(name) for name in names)), dict.fromkeys(names, 1.0))
    little, much = states(2, 3), states(2, SHARED // (2 * D * len(names)) + 1)
    torch.set_num_threads(3)
    try:
        edit(selection, 1, little)
        assert torch.get_num_threads() == 3
        edit(selection, 1, much)
        assert torch.get_num_threads() == 3
        with pytest.raises(RuntimeError):
            edit(selection, 1, little)
        assert torch.get_num_threads() == 3
        assert seen == [1, 3, 1]
        with threads_for(torch.device("cuda"), 1):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_rows_that_all_ask_for_the_same_share_a_selection_however_many_they_are(bank: ModuleBank) -> None:
    both = {"a": 1.0, "b": 0.5}
    assert bank.select([both]) is bank.select([both, dict(both)]) is bank.select([both] * 9)
    assert bank.select([both, {"a": 1.0}]) is not bank.select([both])


def test_a_module_that_the_device_has_no_room_for_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held, rows = bank_of(module("a")), states(1, 3)
    before = edit(select(held, {"a": 1.0}), 1, rows)
    with monkeypatch.context() as full:
        full.setattr(bank_module, "placed", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        for name in ("a", "b"):
            with pytest.raises(torch.OutOfMemoryError):
                held.add(module(name, seed=1))
    assert held.names == ("a",) and torch.equal(edit(select(held, {"a": 1.0}), 1, rows), before)
    held.add(module("b", seed=1))
