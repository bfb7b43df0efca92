"""Flat passes of many sequences at once, as an engine with pages runs them, give what each sequence gives alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.applying.test_gates import LAYER, MODULES, D, states
from tests.core.conftest import bank_of, select
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.passes import Pass
from unbind_core.applying.places import WHOLE_ROW, Places
from unbind_core.applying.selection import Selection

LENGTH, SIZE = 24, 4  # positions of a sequence, and of a page
ASKED = ({"a": 1.0, "b": 0.5}, {}, {"c": 1.0}, {"a": 2.0, "d": 1.0})


class Scattered(Places):
    """Pages in any order; row 0 of the table is the zeros in front."""

    def __init__(self, table: Tensor, pages: Tensor, sequences: Tensor, positions: Tensor, starts: Tensor) -> None:
        changes = torch.cat((torch.tensor([True]), sequences[1:] != sequences[:-1]))
        super().__init__(positions, changes.nonzero()[:, 0], starts)
        self._table, self._pages = table, pages

    def rows(self, positions: Tensor, sequences: Tensor | None) -> Tensor:
        own = torch.arange(positions.shape[-1]) if sequences is None else sequences
        inside = positions.clamp(min=0)
        return torch.where(positions < 0, 0, 1 + self._pages[own, inside // SIZE] * SIZE + inside % SIZE)

    def read(self, layer: int, rows: Tensor, width: int, part: slice = WHOLE_ROW) -> Tensor:
        return self._table[rows, part]

    def write(self, layer: int, columns: Tensor | slice, values: Tensor) -> None:
        rows = self.here
        self._table[rows if isinstance(columns, slice) else rows[:, None], columns] = values


def whole(selection: Selection, sequences: Tensor) -> Tensor:
    """Each sequence by itself, [S,T,d]."""
    return selection.edit(LAYER, sequences).states


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=4, max_size=12),
    st.integers(0, 2**16),
    st.sampled_from([None, 0]),
)
def test_sequences_cut_in_any_way_and_mixed_in_passes_decide_as_they_do_alone(
    cuts: list[list[int]], seed: int, summed_columns: int | None
) -> None:
    bank = ModuleBank(summed_columns=summed_columns)
    for one in MODULES.values():
        bank.add(one)
    selection = select(bank, *ASKED)
    sequences = states(len(ASKED), LENGTH, seed=seed)
    alone = bank_of(*MODULES.values())
    expected = whole(select(alone, *ASKED), sequences)
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(len(ASKED) * LENGTH // SIZE, generator=generator).view(len(ASKED), -1)
    table = torch.full((1 + len(ASKED) * LENGTH, bank.columns[LAYER]), 77, dtype=torch.int32)  # what others left there
    table[0] = 0
    found, at = torch.full_like(expected, torch.nan), [0] * len(ASKED)
    for counts in [*cuts, [LENGTH] * 4]:
        order = torch.randperm(len(ASKED), generator=generator).tolist()
        spans = [(row, at[row], min(at[row] + counts[row], LENGTH)) for row in order]
        spans = [(row, start, end) for row, start, end in spans if end > start]
        if not spans:
            continue
        rows = torch.cat([torch.full((end - start,), row) for row, start, end in spans])
        local = torch.cat([torch.full((end - start,), i) for i, (_, start, end) in enumerate(spans)])
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        places = Scattered(
            table, pages[[row for row, _, _ in spans]], local, positions, torch.tensor([start for _, start, _ in spans])
        )
        decoding = torch.cat([torch.full((end - start,), end - start == 1) for _, start, end in spans])
        flat = sequences[rows, positions]
        edited = selection.edit(LAYER, flat, Pass(rows, places, "prefill", decoding=decoding)).states
        found[rows, positions] = edited
        for row, _, end in spans:
            at[row] = end
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(found[1], sequences[1])  # asked for nothing
    together, apart = (
        {name: tuple(map(sum, zip(*phases.values(), strict=True))) for name, phases in counted.counts().items()}
        for counted in (bank, alone)
    )
    assert together == apart


def test_corrections_are_added_to_what_is_given() -> None:
    bank = bank_of(*MODULES.values())
    selection = select(bank, *ASKED)
    sequences = states(len(ASKED), LENGTH)
    part = torch.randint(-9, 9, sequences.shape, generator=torch.Generator().manual_seed(1)).float()
    added = selection.edit(LAYER, sequences, to=part).states
    torch.testing.assert_close(added - part, whole(selection, sequences) - sequences, atol=1e-5, rtol=0)
    assert torch.equal(added[1], part[1]) and sequences.shape[-1] == D
