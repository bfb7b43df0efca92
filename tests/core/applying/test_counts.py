"""Counts of positions and open gates: of the rows that asked, by phase, without padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.core.applying.test_bank import (
    D,
    axis,
    module,
    states,
)
from tests.core.conftest import bank_of, edit, select


def test_counts_are_those_of_rows_that_asked_by_phase_without_padding() -> None:
    bank = bank_of(module("a", w=axis(0), tau=0.5, s_ref=0.0), module("b", seed=1, tau=1e9))
    h = torch.zeros(3, 4, D)
    h[:, 1:3, 0] = 1.0
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    selection = select(bank, {"a": 1.0}, {"b": 1.0}, {"a": 1.0, "b": 0.0})
    edit(selection, 1, h, real=real)
    assert bank.counts() == {
        "a": {"prefill": (5, 3), "decode": (0, 0)},
        "b": {"prefill": (7, 0), "decode": (0, 0)},
    }
    edit(selection, 1, h[:, 1:2], phase="decode")
    edit(selection, 1, h[:2, 1], rows=torch.tensor([2, 1]), phase="decode")
    assert bank.counts() == {
        "a": {"prefill": (5, 3), "decode": (3, 3)},
        "b": {"prefill": (7, 0), "decode": (4, 0)},
    }


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 0, 0])])
def test_counts_agree_whichever_way_a_batch_is_described(rows: Tensor | None) -> None:
    h = states(3, 5)
    real = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    one, many = bank_of(module()), bank_of(module())
    edit(select(one, {"a": 1.0}), 1, h, rows=rows, real=real)
    edit(select(many, {"a": 1.0}, {"a": 2.0}, {"a": 1.0}), 1, h, real=real)
    assert one.counts() == many.counts()
    assert one.counts()["a"]["prefill"][0] == int(real.sum())
    edit(select(one, {"a": 1.0}), 1, h, rows=rows)
    edit(select(many, {"a": 1.0}, {"a": 2.0}, {"a": 1.0}), 1, h)
    assert one.counts() == many.counts()


def test_counts_go_on_under_a_name_that_comes_back() -> None:
    bank = bank_of(module())
    edit(select(bank, {"a": 1.0}), 1, states(1, 4))
    bank.remove("a")
    bank.add(module(seed=3))
    edit(select(bank, {"a": 1.0}), 1, states(1, 2))
    assert bank.counts()["a"]["prefill"][0] == 6


def test_what_is_not_counted_is_edited_all_the_same() -> None:
    h, bank = states(2, 5), bank_of(module())
    real, none = torch.ones(2, 5).bool(), torch.zeros(2, 5).bool()
    selection = select(bank, {"a": 1.0})
    assert torch.equal(edit(selection, 1, h, real=real, counts=none), edit(selection, 1, h))
    assert bank.counts()["a"]["prefill"][0] == 10
