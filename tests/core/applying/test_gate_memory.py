"""Memory of gates: columns belong to one module at a time, contents survive growth, and rows move as beams do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core.applying.test_gates import LAYER, LENGTH, MODEL, MODULES, D, in_steps, module, states
from tests.core.conftest import bank_of, edit, make_network_module, select
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gate_memory import Columns, GateMemory, SlotPlaces


def places(memory: GateMemory, slots: list[int], positions: list[list[int]], starts: list[int]) -> SlotPlaces:
    return SlotPlaces(memory, torch.tensor(slots), torch.tensor(positions), torch.tensor(starts))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 5)), max_size=30))
def test_no_two_modules_share_a_column_whatever_comes_and_goes(steps: list[tuple[str, int]]) -> None:
    columns, taken = Columns(), dict[str, set[int]]()
    for name, count in steps:
        if name in taken:
            columns.free(name)
            del taken[name]
        else:
            start = columns.take(name, count)
            taken[name] = set(range(start, start + count))
        together = [column for own in taken.values() for column in own]
        assert len(together) == len(set(together))
        assert columns.width == max(together, default=-1) + 1


def test_freed_columns_are_given_out_again() -> None:
    columns = Columns()
    assert [columns.take(name, count) for name, count in (("a", 3), ("b", 2), ("c", 4))] == [0, 3, 5]
    columns.free("b")
    columns.free("nobody")
    assert columns.take("d", 3) == 9  # the gap is too narrow
    assert columns.take("e", 1) == 3 and columns.take("f", 1) == 4
    columns.free("d")
    columns.free("c")
    assert columns.width == 5


def test_a_bank_in_which_modules_come_and_go_does_not_grow_its_memory() -> None:
    bank, memory = ModuleBank(), GateMemory(1, 8)
    for number in range(12):
        bank.add(make_network_module(MODEL, f"m{number}", 1, seed=number))
        selection = bank.select([{f"m{number}": 1.0}])
        assert selection is not None
        edit(selection, 1, torch.zeros(1, 8, 16), places=places(memory, [0], [list(range(8))], [0]))
        if number:
            bank.remove(f"m{number - 1}")
    assert memory.bytes_allocated() == 10 * 2 * (3 + 1) * 4  # positions, two modules of three heads and a state, int32


def test_what_was_written_is_read_by_position_and_zero_before_the_beginning() -> None:
    memory = GateMemory(3, 6)
    columns = torch.tensor([2, 0])
    memory.table(1, 5)
    values = torch.arange(1, 9).view(2, 2, 2).int()
    places(memory, [2, 0], [[0, 1], [3, 6]], [0, 3]).write(1, columns, values.view(4, 2))
    later = places(memory, [2, 0], [[2], [4]], [2, 4])
    found = later.read(1, later.behind(((5, 0), (2, 0), (1, 0))), 4)
    assert found[:, columns].tolist() == [[0, 0], [0, 0], [1, 2], [0, 0], [3, 4], [5, 6]]
    assert torch.equal(later.read(1, later.before, 4), found[4:])
    assert not bool(found[:, [1, 3]].any())  # the columns of others
    assert not bool(later.read(2, later.behind(((1, 0), (2, 0))), 4).any())  # another layer


def test_a_slice_of_columns_is_written_as_an_index_of_them_is() -> None:
    values = torch.randint(-9, 9, (6, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    tables = []
    for columns in (slice(1, 3), torch.tensor([1, 2])):
        memory = GateMemory(3, 6)
        memory.table(0, 4)
        places(memory, [2, 1], [[0, 1, 6], [6, 3, 4]], [0, 3]).write(0, columns, values)
        tables.append(memory.table(0, 4))
    assert torch.equal(*tables) and bool(tables[0].any())


def test_growth_keeps_what_is_there() -> None:
    memory = GateMemory(2, 3)
    assert memory.bytes_allocated() == 0
    columns = torch.tensor([0, 1])
    memory.table(0, 2)
    kept = torch.arange(1, 13).view(2, 3, 2).int()
    everything = places(memory, [0, 1], [[0, 1, 2]] * 2, [0, 0])
    everything.write(0, columns, kept.view(6, 2))
    places(memory, [0, 1], [[3]] * 2, [0, 0]).write(0, columns, torch.full((2, 2), 9).int())  # padding
    assert memory.table(0, 5).shape == (2, 5, 5)  # wider
    memory.lengthen(4)  # longer
    assert memory.length == 6 and memory.table(0, 2).shape == (2, 8, 5)
    memory.lengthen(2)
    assert memory.length == 6
    later = places(memory, [0, 1], [[4]] * 2, [4, 4])
    after = later.read(0, later.behind(tuple((lag, 0) for lag in (4, 3, 2, 1))), 2)[:, columns].view(4, 2, 2)
    assert torch.equal(after[:3], kept.transpose(0, 1))
    assert not bool(after[3].any())  # what was the bin of padding is an empty position now
    assert not bool(memory.table(0, 5)[:, :, 2:].any())


def test_rows_are_reordered_on_every_layer() -> None:
    memory = GateMemory(3, 2)
    for layer in (0, 4):
        memory.table(layer, 1)
        values = torch.tensor([1, 2, 3]).view(3, 1).int() + layer
        places(memory, [0, 1, 2], [[0]] * 3, [0] * 3).write(layer, torch.tensor([0]), values)
    memory.reorder(torch.tensor([2, 2, 0]))
    for layer in (0, 4):
        assert memory.table(layer, 1)[:, 1, 0].tolist() == [3 + layer, 3 + layer, 1 + layer]


def test_padding_of_any_kind_leaves_no_trace_in_a_memory() -> None:
    sequences = list(states(2, 12))
    selection = select(bank_of(MODULES["a"]), {"a": 1.0})
    memory = GateMemory(2, 12)
    positions = torch.tensor([[12, 0, 12, 1], [0, 12, 12, 1]])
    places = SlotPlaces(memory, torch.arange(2), positions, torch.zeros(2).long())
    broken = torch.full((2, 4, D), float("nan"))
    broken[0, [1, 3]], broken[1, [0, 3]] = sequences[0][:2], sequences[1][:2]
    first = edit(selection, LAYER, broken, real=positions < 12, places=places)
    rest = SlotPlaces(memory, torch.arange(2), torch.arange(2, 12).expand(2, -1), torch.tensor([2, 2]))
    found = edit(selection, LAYER, torch.stack(sequences)[:, 2:], places=rest)
    whole = edit(selection, LAYER, torch.stack(sequences))
    assert torch.equal(found, whole[:, 2:])
    assert torch.equal(first[0, [1, 3]], whole[0, :2]) and torch.equal(first[1, [0, 3]], whole[1, :2])


def test_a_rewound_slot_knows_nothing_of_what_stood_behind() -> None:
    """A prefix is used again with another continuation, and a slot from its beginning by another sequence."""
    selection = select(bank_of(MODULES["a"], MODULES["b"]), {"a": 1.0, "b": 1.0})
    memory = GateMemory(3, LENGTH)
    first, second = states(LENGTH), states(LENGTH, seed=8)

    def run(sequence: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, len(sequence))[None]
        places = SlotPlaces(memory, torch.tensor([1]), positions, torch.tensor([start]))
        return edit(selection, LAYER, sequence[None, start:], places=places)[0]

    run(first, 0)
    for kept in (25, 7, 1, 0):
        branch = torch.cat((first[:kept], second[kept:]))
        assert torch.equal(run(branch, kept), edit(selection, LAYER, branch[None])[0, kept:])
        run(first, kept)


def test_a_new_module_of_the_same_name_starts_without_a_past() -> None:
    memory = GateMemory(1, LENGTH)
    bank = bank_of(MODULES["a"])
    sequence = states(LENGTH)
    in_steps(select(bank, {"a": 1.0}), [sequence], [[LENGTH]], False, memory, [0])
    bank.add(module("a", seed=5, heads=2))
    found = in_steps(select(bank, {"a": 1.0}), [sequence], [[1] * LENGTH], False, memory, [0])[0]
    assert torch.equal(found, edit(select(bank, {"a": 1.0}), LAYER, sequence[None])[0])


def test_a_selection_in_use_is_not_disturbed_by_modules_that_come() -> None:
    memory = GateMemory(2, LENGTH)
    bank = bank_of(MODULES["a"])
    sequence = states(LENGTH)
    selection = select(bank, {"a": 1.0})
    expected = edit(selection, LAYER, sequence[None])[0]
    half = in_steps(selection, [sequence[:20]], [[20]], False, memory, [0])[0]
    bank.add(MODULES["b"])
    in_steps(select(bank, {"b": 1.0}), [sequence], [[LENGTH]], False, memory, [1])  # grows the table
    rest = SlotPlaces(memory, torch.tensor([0]), torch.arange(20, LENGTH)[None], torch.tensor([20]))
    found = edit(selection, LAYER, sequence[None, 20:], places=rest)[0]
    assert torch.equal(torch.cat((half, found)), expected)


@pytest.mark.parametrize("inside", [True, False])
def test_a_memory_made_in_inference_mode_serves_outside_it_and_the_other_way(inside: bool) -> None:
    memory = GateMemory(1, 20)
    sequence = states(20)
    selection = select(bank_of(MODULES["a"]), {"a": 1.0})
    parts = []
    for start, stop in ((0, 9), (9, 20)):
        places = SlotPlaces(memory, torch.tensor([0]), torch.arange(start, stop)[None], torch.tensor([start]))
        with torch.inference_mode(inside == (start == 0)):
            parts.append(edit(selection, LAYER, sequence[None, start:stop], places=places)[0])
    assert torch.equal(torch.cat(parts), edit(selection, LAYER, sequence[None])[0])


def test_an_edit_can_be_differentiated_and_a_memory_holds_no_graph() -> None:
    memory = GateMemory(1, 8)
    sequence = states(1, 8).requires_grad_(True)
    places = SlotPlaces(memory, torch.tensor([0]), torch.arange(8)[None], torch.tensor([0]))
    edit(select(bank_of(MODULES["a"]), {"a": 1.0}), LAYER, sequence, places=places).sum().backward()
    assert sequence.grad is not None and torch.equal(sequence.grad, torch.ones_like(sequence))
    assert not memory.table(LAYER, 0).requires_grad
