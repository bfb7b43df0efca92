"""Gates that go by kept states decide as those with running sums do, and their memory does not grow with heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.applying.test_gates import LAYER, LENGTH, MODEL, D, by_hand, cuttings, in_steps, module, states
from tests.core.conftest import edit, make_module, select
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gate_memory import GateMemory, SlotPlaces
from unbind_core.applying.passes import Pass
from unbind_core.module import UnbindModule

SUMMED, KEPT, MIXED = 10**9, 0, 9  # columns of running sums that a layer may have
MODULES = {
    "a": module("a"),
    "b": module("b", seed=1, heads=1, window=9, s_ref=0.5, tau_close=None, first=3, least=4),
    "c": module("c", seed=2, window=1, s_ref=1.0, tau=2.0, tau_close=0.0),
    "d": make_module(MODEL, "d", LAYER, seed=3, s_ref=0.0, tau=0.5, kappa=2.0),
    "e": module("e", seed=4, heads=5, width=9, window=9, s_ref=2.0, tau_close=0.1, first=3, hold=30),
    "f": module("f", seed=5, window=40, s_ref=1.0, tau_close=0.0, least=7),
    "i": module("i", seed=8, heads=3, window=4, tau_close=0.3, hold=100),
    "g": module("g", seed=6, heads=2, window=127, s_ref=-3.0, tau=2.0),  # open nearly everywhere
    "h": module("h", seed=7, heads=2, window=4, s_ref=30.0),  # nowhere
}
ROWS = (dict.fromkeys(MODULES, 1.0), {}, {"c": 1.0, "f": 0.5, "h": 1.0}, {"b": 2.0, "e": 0.0, "a": 1.0})


def bank_of(modules: dict[str, UnbindModule], summed: int) -> ModuleBank:
    bank = ModuleBank(summed_columns=summed)
    for one in modules.values():
        bank.add(one)
    return bank


@settings(max_examples=40, deadline=None)
@given(cuttings(), st.sampled_from([KEPT, MIXED]), st.integers(0, 999))
def test_every_cut_and_mix_is_decided_as_with_running_sums(
    how: tuple[list[list[int]], bool], summed: int, seed: int
) -> None:
    cuts, left = how
    sequences = [states(sum(cut), seed=seed + i) for i, cut in enumerate(cuts)]
    found, counts = [], []
    for columns in (SUMMED, summed):
        bank = bank_of(MODULES, columns)
        found.append(in_steps(select(bank, *ROWS), sequences, cuts, left, GateMemory(6, LENGTH), [4, 0, 5, 2]))
        counts.append(bank.counts())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert counts[0] == counts[1]


def test_they_are_open_where_a_plain_loop_says() -> None:
    sequences = states(3, LENGTH, seed=11)
    record: list[tuple[tuple[str, ...], Tensor]] = []
    edit(select(bank_of(MODULES, KEPT), dict.fromkeys(MODULES, 0.0)), LAYER, sequences, record=record)
    opened = {name: table[..., i] != 0 for names, table in record for i, name in enumerate(names)}
    for name, one in MODULES.items():
        if one.tau_close != 0.0 and one.heads is not None:  # else open with a mean of 0
            assert opened[name].tolist() == [by_hand(one, sequence) for sequence in sequences], name
    assert bool(opened["g"].any()) and not bool(opened["h"].any())


def alternating(window: int, high: float, low: float) -> tuple[UnbindModule, Tensor]:
    """Two heads of which one is ``high`` thresholds at every state and the other ``low``, in turns."""
    w = torch.zeros(2, D)
    w[0, 0] = w[1, 1] = 1.0
    heads = torch.tensor([[high, low], [low, high]])
    parts: dict[str, Any] = {"b": torch.zeros(2), "heads": heads, "heads_b": torch.zeros(2)}
    one = replace(module(), w=w, **parts, window=window, least=window, s_ref=0.0)
    sequence = torch.zeros(LENGTH, D)
    sequence[::2, 0] = sequence[1::2, 1] = 1.0
    return one, sequence


@pytest.mark.parametrize(("high", "low", "wanted"), [(1.5, 0.0, False), (2.0, 0.0, True), (2.0, -0.25, False)])
def test_heads_that_are_high_in_turns_are_asked_and_open_only_on_their_own_mean(
    high: float, low: float, wanted: bool
) -> None:
    """The bound, which takes the higher of both at each state, says little here; 2 and 0 have a mean of exactly 1."""
    one, sequence = alternating(8, high, low)
    assert any(by_hand(one, sequence)[8:]) == wanted
    for step in (LENGTH, 1):
        found = [
            in_steps(
                select(bank_of({"a": one}, summed), {"a": 1.0}),
                [sequence],
                [[step] * (LENGTH // step)],
                False,
                GateMemory(1, LENGTH),
                [0],
            )[0]
            for summed in (SUMMED, KEPT)
        ]
        assert torch.equal(*found)
        assert bool((found[0] != sequence)[8:].any()) == wanted


@pytest.mark.parametrize("scale", [0.3, 1.0, 30.0, 1e4])
def test_states_of_any_size_are_decided_alike(scale: float) -> None:
    """No round numbers: products may differ in their last bit, for which a bound has a grain to spare."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    modules = {}
    for i in range(40):
        parts: dict[str, Any] = {
            "w": normal(12, D) / 4,
            "b": normal(12),
            "heads": normal(7, 12) / 4,
            "heads_b": normal(7),
        }
        window = (1, 4, 8, 32)[i % 4]
        limits = {"s_ref": 0.1 * i * scale, "tau": scale, "tau_close": scale / 2}
        modules[f"m{i}"] = replace(module(f"m{i}"), **parts, **limits, window=window, hold=(None, 50)[i % 3 == 0])
    sequences = scale * (normal(4, 96, D) + normal(4, 1, D))
    counts = []
    for summed in (SUMMED, KEPT):
        bank = bank_of(modules, summed)
        selection, memory, found = select(bank, dict.fromkeys(modules, 0.0)), GateMemory(4, 96), []
        for start, end in ((0, 31), (31, 64), *((at, at + 1) for at in range(64, 96))):
            record: list[tuple[tuple[str, ...], Tensor]] = []
            places = SlotPlaces(
                memory, torch.arange(4), torch.arange(start, end).expand(4, -1), torch.full((4,), start)
            )
            selection.edit(LAYER, sequences[:, start:end], Pass(None, places, "prefill", record=record))
            ((names, table),) = record
            found.append(table[..., [names.index(name) for name in modules]])
        counts.append(torch.cat(found, 1))
    torch.testing.assert_close(*counts, atol=3e-3, rtol=0)
    assert torch.equal(counts[0] == 0, counts[1] == 0)
    assert 0.02 < float((counts[0] != 0).float().mean()) < 0.9


def test_a_prefix_that_is_used_again_brings_states_and_gates_along() -> None:
    bank, memory = bank_of(MODULES, KEPT), GateMemory(1, LENGTH)
    selection = select(bank, dict.fromkeys(MODULES, 1.0))
    first, second = states(2, LENGTH, seed=21)
    second[:17] = first[:17]
    whole = edit(select(bank, dict.fromkeys(MODULES, 1.0), {}), LAYER, second.expand(2, -1, -1))[0]
    for sequence, start in ((first, 0), (second, 17)):
        places = SlotPlaces(memory, torch.tensor([0]), torch.arange(start, LENGTH)[None], torch.tensor([start]))
        found = edit(selection, LAYER, sequence[None, start:], places=places)[0]
    assert torch.equal(found, whole[17:])


def test_memory_grows_by_two_bytes_a_module_once_running_sums_have_their_share() -> None:
    bank = ModuleBank()
    widths = []
    for i in range(40):
        bank.add(module(f"m{i}", seed=i, heads=5))
        widths.append(bank.columns[LAYER])
    # five heads and a gate's state a column each, up to as many as a state has numbers; then the state, and halves
    assert widths[:4] == [6, 12, 12 + D + 1, 12 + D + 1] and widths[-1] == 12 + D + 19
    for i in range(40):
        if i != 20:
            bank.remove(f"m{i}")
    sequences = states(2, LENGTH)
    assert torch.equal(
        edit(select(bank, {"m20": 1.0}), LAYER, sequences),
        edit(select(bank_of({"m20": bank["m20"]}, SUMMED), {"m20": 1.0}), LAYER, sequences),
    )
    bank.remove("m20")
    assert bank.columns == {}


def test_a_selection_goes_on_when_modules_come_and_go_around_it() -> None:
    bank, memory = bank_of(MODULES, KEPT), GateMemory(1, LENGTH)
    wanted = dict.fromkeys("aceg", 1.0)
    sequence = states(1, LENGTH)
    whole = edit(select(bank, wanted), LAYER, sequence)
    found = []
    for at in range(LENGTH):
        places = SlotPlaces(memory, torch.tensor([0]), torch.tensor([[at]]), torch.tensor([at]))
        found.append(edit(select(bank, wanted), LAYER, sequence[:, at : at + 1], places=places))
        if at == 9:
            bank.remove("b")
        if at == 19:
            bank.add(module("z", seed=40, heads=9))
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-5, rtol=0)


def test_windows_too_long_for_two_bytes_have_running_sums() -> None:
    modules = {"a": module("a", window=128), "b": module("b", window=127), "c": module("c", hold=128)}
    assert bank_of(modules, KEPT).columns[LAYER] == 4 + 4 + D + 1


def test_flat_states_without_places_are_refused() -> None:
    with pytest.raises(ValueError, match="need places"):
        edit(
            select(bank_of({"a": MODULES["a"]}, KEPT), {"a": 1.0}),
            LAYER,
            states(5),
            rows=torch.zeros(5, dtype=torch.int64),
        )
