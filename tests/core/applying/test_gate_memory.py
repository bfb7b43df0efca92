"""Memory of gates: columns belong to one module at a time, contents survive growth, and rows move as beams do."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.conftest import edit, make_network_module
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gate_memory import Columns, GateMemory, Places
from unbind_core.identity import ModelIdentity

MODEL = ModelIdentity("f" * 64, "tiny", 16, 4)


def places(memory: GateMemory, slots: list[int], positions: list[list[int]], starts: list[int]) -> Places:
    return Places(memory, torch.tensor(slots), torch.tensor(positions), torch.tensor(starts))


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
    places(memory, [2, 0], [[0, 1], [3, 6]], [0, 3]).write(1, columns, values)
    later = places(memory, [2, 0], [[2], [4]], [2, 4])
    found = later.read(1, later.behind((5, 2, 1)), 4)
    assert found[:, :, columns].tolist() == [[[0, 0], [1, 2], [3, 4]], [[0, 0], [0, 0], [5, 6]]]
    assert torch.equal(later.read(1, later.before, 4), found[:, 2:])
    assert not bool(found[:, :, [1, 3]].any())  # the columns of others
    assert not bool(later.read(2, later.behind((1, 2)), 4).any())  # another layer


def test_a_slice_of_columns_is_written_as_an_index_of_them_is() -> None:
    values = torch.randint(-9, 9, (2, 3, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
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
    everything.write(0, columns, kept)
    places(memory, [0, 1], [[3]] * 2, [0, 0]).write(0, columns, torch.full((2, 1, 2), 9).int())  # padding
    assert memory.table(0, 5).shape == (2, 5, 5)  # wider
    memory.lengthen(4)  # longer
    assert memory.length == 6 and memory.table(0, 2).shape == (2, 8, 5)
    memory.lengthen(2)
    assert memory.length == 6
    later = places(memory, [0, 1], [[4]] * 2, [4, 4])
    after = later.read(0, later.behind((4, 3, 2, 1)), 2)[..., columns]
    assert torch.equal(after[:, :3], kept)
    assert not bool(after[:, 3].any())  # what was the bin of padding is an empty position now
    assert not bool(memory.table(0, 5)[:, :, 2:].any())


def test_rows_are_reordered_on_every_layer() -> None:
    memory = GateMemory(3, 2)
    for layer in (0, 4):
        memory.table(layer, 1)
        values = torch.tensor([1, 2, 3]).view(3, 1, 1).int() + layer
        places(memory, [0, 1, 2], [[0]] * 3, [0] * 3).write(layer, torch.tensor([0]), values)
    memory.reorder(torch.tensor([2, 2, 0]))
    for layer in (0, 4):
        assert memory.table(layer, 1)[:, 1, 0].tolist() == [3 + layer, 3 + layer, 1 + layer]
