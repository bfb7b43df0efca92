"""Networks of many modules in blocks: what a block boundary changes (nothing), and what a change of the bank makes anew."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.core.applying.test_gates import LAYER, LENGTH, module, states
from tests.core.applying.test_kept_gates import KEPT, MIXED, MODULES, ROWS, SUMMED, bank_of
from tests.core.conftest import edit, select
from unbind_core.applying import bank as bank_file
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.networks import Block
from unbind_core.module import UnbindModule

MANY = {f"m{i}": module(f"m{i}", seed=i, heads=1 + i % 3, window=(4, 9)[i % 2], s_ref=0.2 * (i % 5)) for i in range(20)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_file, "_BLOCK", 4)
    monkeypatch.setattr(bank_file, "_BLOCK_COLUMNS", 8)


def blocks(bank: ModuleBank) -> list[Block]:
    return select(bank, dict.fromkeys(bank.names, 1.0)).blocks


def written(bank: ModuleBank, *rows: dict[str, float]) -> torch.Tensor:
    return edit(select(bank, *rows), LAYER, states(len(rows), LENGTH, seed=3))


@pytest.mark.parametrize("summed", [KEPT, MIXED, SUMMED])
@pytest.mark.parametrize("modules", [MODULES, MANY])
def test_small_blocks_decide_as_large_ones(
    summed: int, modules: dict[str, UnbindModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ROWS if modules is MODULES else (dict.fromkeys(MANY, 1.0), {"m3": 1.0, "m7": 0.5}, {}, {"m1": 2.0})
    large = bank_of(modules, summed)
    expected, counts, fewest = written(large, *rows), large.counts(), len(blocks(large))
    for columns in (1, 3):
        with monkeypatch.context() as patch:
            patch.setattr(bank_file, "_BLOCK", columns)
            patch.setattr(bank_file, "_BLOCK_COLUMNS", columns)
            other = bank_of(modules, summed)
            assert modules is MODULES or len(blocks(other)) > fewest
            torch.testing.assert_close(written(other, *rows), expected, atol=1e-5, rtol=0)
            assert other.counts() == counts


@pytest.mark.parametrize("summed", [KEPT, SUMMED])
@pytest.mark.usefixtures("small")
def test_what_comes_or_goes_is_the_matter_of_one_block(summed: int) -> None:
    bank = bank_of(MANY, summed)
    before = blocks(bank)
    assert len(before) >= 4
    bank.add(module("new", seed=99, heads=2, window=9))
    after = blocks(bank)
    assert len(set(after) - set(before)) == 1 and len(set(before) - set(after)) <= 1
    bank.remove("m5")
    gc.collect()  # nobody holds the selections before
    last = blocks(bank)
    assert len(set(last) - set(after)) <= 1 and len(set(after) - set(last)) == 1
    bank.add(module("m6", seed=77, heads=3, window=4))  # another of that name: it goes and comes
    assert len(set(blocks(bank)) - set(last)) <= 2

    afresh = bank_of({name: bank[name] for name in bank.names}, summed)
    row = dict.fromkeys(bank.names, 1.0)
    torch.testing.assert_close(written(bank, row), written(afresh, row), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("small")
def test_blocks_of_what_is_gone_go_too() -> None:
    bank = bank_of(MANY, KEPT)
    gone = [weakref.ref(block) for block in blocks(bank)]
    for name in MANY:
        bank.remove(name)
    bank.add(module("new", window=9))
    blocks(bank)  # a selection is made
    bank.add(module("newer", window=9))  # and is the one before
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
