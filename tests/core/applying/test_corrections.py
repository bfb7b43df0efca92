"""Pushes and low-rank corrections, under gates of either kind: any mix is the sum of its modules, each as its formula says."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.applying.test_gates import by_hand
from tests.core.conftest import bank_of, edit, lowrank, make_module, make_network_module, select
from tests.support.modules import rectified
from unbind_core.applying import corrections
from unbind_core.applying.corrections import added, corrected
from unbind_core.applying.gate_memory import GateMemory, SlotPlaces
from unbind_core.errors import ModuleFileError
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule

D, LAYER, LENGTH = 16, 1, 30
MODEL = ModelIdentity("f" * 64, "tiny", D, 4)
MAKE = {"fisher": make_module, "network": make_network_module}
OF_RANK = {0: None, 1: lowrank, 2: rectified, 5: lowrank, 6: rectified}
KINDS = [(detector, rank) for detector in MAKE for rank in OF_RANK]


def made(name: str, detector: str, rank: int, seed: int = 0, **changes: Any) -> UnbindModule:
    correction = OF_RANK.get(rank, lowrank)
    low = correction(D, rank, seed) if correction else {}
    return MAKE[detector](MODEL, name, LAYER, seed=seed, **(low | {"kappa": 0.5} | changes))


def states(*shape: int, seed: int = 7) -> Tensor:
    """Multiples of 1/2: scores of such states are exact in FP32, so that every gate decides alike in any batch."""
    return torch.randint(-2, 3, (*shape, D), generator=torch.Generator().manual_seed(seed)) / 2


EVERY = {f"m{i}": made(f"m{i}", *kind, seed=i % 6) for i, kind in enumerate(KINDS)}


def change_by_hand(one: UnbindModule, strength: float, sequence: Tensor) -> Tensor:
    """What one module adds to a sequence [T,d], in FP64 straight from the formulas."""
    h = sequence.double()
    if one.detector == "network":
        amount = torch.tensor(by_hand(one, sequence)).double()
    else:
        a = (h @ one.w.double() - one.s_ref).clamp(min=0)
        amount = torch.where(a >= one.tau, a, 0.0)
    if one.v is not None:
        return -(amount * one.kappa * strength)[:, None] * one.v.double()
    assert one.u is not None and one.a is not None and one.c is not None
    within = h @ one.a.double().T
    if one.e is not None:
        within = (within + one.e.double()).clamp(min=0)
    update = within @ one.u.double().T + one.c.double()
    return (amount * one.kappa * strength)[:, None] * update


strengths = st.dictionaries(st.sampled_from(sorted(EVERY)), st.sampled_from([0.0, 0.5, 1.0, 3.0]), max_size=len(EVERY))


@settings(max_examples=40, deadline=None)
@given(st.lists(strengths, min_size=1, max_size=5))
def test_any_mix_adds_what_each_of_its_modules_adds_alone(rows: list[dict[str, float]]) -> None:
    sequences = states(len(rows), LENGTH)
    selection = bank_of(*EVERY.values()).select(rows)
    found = sequences if selection is None else edit(selection, LAYER, sequences)
    for row, wanted in enumerate(rows):
        total = sum((change_by_hand(EVERY[n], s, sequences[row]) for n, s in wanted.items()), torch.zeros(()))
        torch.testing.assert_close(found[row].double(), sequences[row].double() + total, atol=1e-4, rtol=1e-5)
        if not any(wanted.values()):
            assert torch.equal(found[row], sequences[row])


def test_each_of_these_modules_changes_something_and_not_everything() -> None:
    for name, one in EVERY.items():
        changed = (edit(select(bank_of(one), {name: 1.0}), LAYER, states(3, LENGTH)) != states(3, LENGTH)).any(-1)
        assert 0 < int(changed.sum()) < changed.numel()


def test_the_order_of_adding_modules_does_not_matter() -> None:
    exact = {f"e{i}": made(f"e{i}", *kind, seed=i) for i, kind in enumerate(product(MAKE, (0, 1, 5)))}
    for every, apart in ((exact, 0.0), (EVERY, 1e-6)):  # of more kinds but for the order in which a product is added up
        rows = [dict.fromkeys(every, 1.0), {}]
        found, other = (
            edit(select(bank_of(*some), *rows), LAYER, states(2, LENGTH))
            for some in (every.values(), reversed(every.values()))
        )
        torch.testing.assert_close(found, other, atol=apart, rtol=apart)


@pytest.mark.parametrize("detector", list(MAKE))
def test_a_low_rank_correction_without_ranks_is_a_push(detector: str) -> None:
    push = made("a", detector, 0, kappa=2.5)
    assert push.v is not None
    tensors = {"u": torch.zeros(D, 4), "a": lowrank(D, 4)["a"], "c": -push.v}
    low = made("a", detector, 4, kappa=2.5, **tensors)
    for rows in ([{"a": 1.0}], [{"a": 1.0}, {"a": 0.3}, {}]):
        sequences = states(max(2, len(rows)), LENGTH)
        found = [edit(select(bank_of(one), *rows), LAYER, sequences) for one in (push, low)]
        # Equal but for the order in which a product of another length is added up, which differs between processors.
        torch.testing.assert_close(*found, atol=1e-6, rtol=1e-6)
        assert torch.equal(*(one == sequences for one in found))


@pytest.mark.parametrize("detector", list(MAKE))
def test_a_row_without_modules_is_not_harmed_by_states_that_are_not_finite(detector: str) -> None:
    sequences = states(3, LENGTH)
    sequences[1, 4, 2], sequences[1, 5, 3] = float("inf"), float("nan")
    bank = bank_of(made("a", detector, 3), made("b", detector, 0, seed=1))
    found = edit(select(bank, {"a": 1.0}, {}, {"b": 1.0}), LAYER, sequences)
    assert torch.equal(found[1].nan_to_num(nan=7.0), sequences[1].nan_to_num(nan=7.0))
    assert bool(torch.isfinite(found[0]).all()) and bool(torch.isfinite(found[2]).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("detector", list(MAKE))
def test_arithmetic_is_in_single_precision_and_cast_before_the_addition(detector: str, dtype: torch.dtype) -> None:
    one, sequences = made("a", detector, 3), states(2, LENGTH)
    single = edit(select(bank_of(one), {"a": 1.0}), LAYER, sequences)
    u, a, c = (one.tensors[name] for name in "uac")
    amount = torch.stack([change_by_hand(one, 1.0, sequence).abs().sum(-1) for sequence in sequences]) > 0
    found = edit(select(bank_of(one), {"a": 1.0}), LAYER, sequences.to(dtype))
    assert found.dtype == dtype and torch.equal(found[~amount], sequences.to(dtype)[~amount])
    if detector == "network":  # whose amount is 1
        whole = sequences.to(dtype) + (one.kappa * (sequences @ a.T @ u.T + c)).to(dtype)
        torch.testing.assert_close(found[amount], whole[amount])
    torch.testing.assert_close(found.float(), single, atol=0.1, rtol=0.02)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, LENGTH), max_size=4), st.sampled_from(sorted(EVERY)))
def test_a_sequence_cut_into_passes_is_edited_as_the_whole(cuts: list[int], more: str) -> None:
    wanted = {"m4": 1.0, "m2": 0.5, more: 2.0}
    bank = bank_of(*EVERY.values())
    sequence = states(1, LENGTH)
    memory, parts = GateMemory(2, LENGTH), []
    edges = [0, *sorted(cuts), LENGTH]
    for start, end in pairwise(edges):
        if start < end:
            places = SlotPlaces(memory, torch.tensor([1]), torch.arange(start, end)[None], torch.tensor([start]))
            parts.append(edit(select(bank, wanted), LAYER, sequence[:, start:end], places=places))
    torch.testing.assert_close(torch.cat(parts, 1), edit(select(bank, wanted), LAYER, sequence), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("detector", list(MAKE))
def test_a_fit_and_the_bank_do_one_arithmetic(detector: str) -> None:
    one, sequences = made("a", detector, 6, kappa=1.0), states(2, LENGTH)
    record: list[tuple[tuple[str, ...], Tensor]] = []
    found = edit(select(bank_of(one), {"a": 1.0}), LAYER, sequences, record=record)
    amount = record[0][1][..., 0]
    if detector == "network":
        amount = (amount > 0).float()
    assert torch.equal(corrected(sequences, amount, *(one.tensors[name].float() for name in "uace")), found)


def test_a_correction_can_be_learned() -> None:
    """Its gradients are those of the formula, and none leaks from where the amount is 0."""
    h, amount = states(4, 6).double().float(), torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    amount[0] = 0
    tensors = [rectified(D, 3)[name].float().requires_grad_(True) for name in "uace"]
    tensors[3].data += 1 / 16  # nowhere exactly at the edge, where any slope between is right
    h.requires_grad_(True)
    weights = states(4, 6, seed=9)
    (corrected(h, amount, *tensors) * weights).sum().backward()
    found = [tensor.grad.clone() for tensor in (*tensors, h) if tensor.grad is not None]
    for tensor in (*tensors, h):
        tensor.grad = None
    u, a, c, e = tensors
    ((h + amount[..., None] * ((h @ a.T + e).relu() @ u.T + c)) * weights).sum().backward()
    assert len(found) == 5
    for one, tensor in zip(found, (*tensors, h), strict=True):
        torch.testing.assert_close(one, tensor.grad, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[4][0], weights[0])


def test_a_cpu_spends_no_product_where_no_gate_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def counting(*given: Any) -> Tensor:
        calls.append(1)
        return added(*given)

    monkeypatch.setattr(corrections, "added", counting)
    one = made("a", "fisher", 3, tau=1e6)
    bank, sequences = bank_of(one, made("b", "fisher", 3)), states(2, LENGTH)
    assert torch.equal(edit(select(bank, {"a": 1.0}), LAYER, sequences), sequences)
    assert not calls and bank.counts()["a"]["prefill"] == (2 * LENGTH, 0)
    edit(select(bank, {"a": 1.0, "b": 1.0}), LAYER, sequences)
    assert calls == [1]


def test_where_few_of_many_modules_act_theirs_alone_are_multiplied() -> None:
    every = {f"m{i}": made(f"m{i}", "network", i % 3, seed=i) for i in range(24)}
    bank, sequences = bank_of(*every.values()), states(3, LENGTH)
    for acting in (["m3"], ["m4"], ["m3", "m4", "m20"]):  # a push, a low-rank one, those and a network
        wanted = dict.fromkeys(every, 0.0) | dict.fromkeys(acting, 1.0)
        found = edit(select(bank, wanted), LAYER, sequences)
        alone = edit(select(bank, dict.fromkeys(acting, 1.0)), LAYER, sequences)
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-5)
        assert not torch.equal(found, sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_however_many_act_no_more_than_so_much_is_put_together(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {f"m{i}": made(f"m{i}", "network", (0, 1, 6)[i % 3], seed=i) for i in range(12)}
    wanted, sequences = dict.fromkeys(every, 1.0), states(3, LENGTH).to(dtype)
    whole = edit(select(bank_of(*every.values()), wanted), LAYER, sequences)
    made_of = list[int]()

    def counting(h: Tensor, amount: Tensor, by: corrections.Stacked, to: Tensor) -> Tensor:
        made_of.append(by.into.shape[1])
        return added(h, amount, by, to)

    monkeypatch.setattr(corrections, "added", counting)
    for ranks, most in ((13, 13), (1, 6)):  # a module that is larger itself is one group
        made_of.clear()
        monkeypatch.setattr(corrections, "STACKED", ranks * 2 * 4 * D)
        found = edit(select(bank_of(*every.values()), wanted), LAYER, sequences)
        assert len(made_of) > 1 and max(made_of) <= most and sum(made_of) == 21
        torch.testing.assert_close(found, whole, atol=1e-4 if dtype == torch.float32 else 2**-6, rtol=1e-5)


def test_a_device_of_its_own_keeps_no_large_matrices_for_each_mix_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are many mixes, and no plan of its memory knows of them. Tensors without numbers stand for those of a GPU."""
    for device, most, kept in (("meta", 1, False), ("meta", corrections.KEPT, True), ("cpu", 1, True)):
        monkeypatch.setattr(corrections, "KEPT", most)
        modules = [made(f"m{seed}", "network", 2, seed=seed) for seed in range(3)]
        tensors = [{name: part.to(device) for name, part in one.tensors.items()} for one in modules]
        some = corrections.Corrections(tensors, torch.ones(3, device=device))
        assert (some.stacked(range(3)) is some.stacked(range(3))) == kept


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("v", {"kappa": 1e38}),
        ("u", {**lowrank(D), "u": torch.full((D, 3), 1e20), "kappa": 1e19}),
        ("c", {**lowrank(D), "c": torch.full((D,), 1e20), "kappa": 1e19}),
        ("c", {**lowrank(D), "c": torch.full((D,), -1e38), "kappa": 0.1}),
        ("a", {**lowrank(D), "a": torch.full((3, D), 1e36)}),
        ("a", {**rectified(D), "e": torch.full((3,), 3e38)}),
    ],
)
def test_a_module_whose_correction_overflows_is_refused_as_it_would_spoil_what_others_answer(
    field: str, changes: dict[str, Any]
) -> None:
    """Infinity times the 0 of its closed gate is not a number, in every row of a batch."""
    with pytest.raises(ModuleFileError, match=f"module '.*': {field} must (stay|leave what u makes of it) finite"):
        make_module(MODEL, **changes)
