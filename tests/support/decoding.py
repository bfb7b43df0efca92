"""Decode steps by torch and by the kernels, side by side: everything that either says, writes and counts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from server.engine.vllm.pages import LastPositions, PagedMemory, Pages
from tests.core.conftest import lowrank, make_module, make_network_module
from tests.support.modules import rectified
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gate_memory import GateMemory, SlotPlaces
from unbind_core.applying.passes import Pass, Record
from unbind_core.applying.places import Places
from unbind_core.applying.selection import Edit
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule

LAYER, PAGE, LONGEST, STEPS = 1, 4, 80, 12
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-6}


class Side:
    """A bank with its memory, of slots or of pages; what is kept of the same sequences in both lies at the same places."""

    def __init__(
        self, device: torch.device, modules: list[UnbindModule], kernels: bool | None, paged: bool, count: int
    ) -> None:
        self.bank = ModuleBank(device, one_table=paged, requests=4 * count, kernels=kernels)
        for one in modules:
            self.bank.add(one)
        self.device, columns = device, max(self.bank.columns.values())
        self.slots = GateMemory(count, LONGEST, device)
        pages = LONGEST // PAGE
        self.pages = PagedMemory(count * pages, PAGE, columns + 3, device) if paged else None
        generator = torch.Generator().manual_seed(count)
        order = torch.randperm(count * pages, generator=generator).to(device, torch.int32)
        self.tables = torch.cat(
            (order.view(count, pages), torch.full((1, pages), -1).to(order))
        )  # wider than the batch

    @property
    def memory(self) -> Tensor:
        return self.slots.table(LAYER, 0) if self.pages is None else self.pages.table

    def places(self, chosen: list[int], starts: list[int], length: int) -> Places:
        """Where these sequences' next states stand."""
        device, which = self.device, torch.tensor(chosen, device=self.device)
        begins = torch.tensor(starts, device=device)
        positions = begins[:, None] + torch.arange(length, device=device)
        if len(set(starts)) == 1:  # as ``attach`` has them: one row in memory for all
            positions = positions[:1].clone().expand(len(chosen), length)
        if self.pages is None:
            return SlotPlaces(self.slots, which, positions, begins)
        tables, each = self.tables[[*chosen, -1]], torch.arange(len(chosen), device=device)[:, None]
        here = (tables[each, positions // PAGE] * PAGE + positions % PAGE).reshape(-1)
        if length == 1:
            return LastPositions(self.pages, tables, begins.int() + 1, here)
        firsts = length * torch.arange(len(chosen), device=device, dtype=torch.int32)
        return Pages(self.pages, tables, firsts, begins, positions.reshape(-1), here)


def some_modules(drawn: random.Random, d: int, count: int) -> list[UnbindModule]:
    """Networks of any shape, and one of the paper's gates; scores of whole or half numbered states are exact."""
    model = ModelIdentity("f" * 64, "tiny", d, 4)
    made = [make_module(model, "paper", LAYER, seed=99, s_ref=0.0, tau=0.5)]
    for i in range(count):
        window = drawn.choice((1, 2, 5, 32, 64))
        changes: dict[str, Any] = {
            "window": window,
            "first": drawn.choice((0, 0, 3)),
            "least": min(window, drawn.choice((1, 1, 4))),
            "tau_close": drawn.choice((None, 0.0, 0.5)),
            "hold": drawn.choice((None, window + 1, 100)),
            "tau": drawn.choice((0.5, 1.0, 2.0)),
            "s_ref": drawn.choice((-2.0, 0.5, 1.5)),
            "kappa": drawn.choice((0.25, 3.0)),
            "heads": drawn.choice((1, 3, 40)),
            "width": drawn.choice((4, 6)),
        }
        if drawn.random() < 0.6:
            changes |= drawn.choice((lowrank, rectified))(d, drawn.choice((1, 7, 40)), i)
        made.append(make_network_module(model, f"m{i}", LAYER, seed=i, **changes))
    return made


def some_row(drawn: random.Random, names: list[str]) -> Mapping[str, float]:
    """What a request asks for."""
    share = drawn.choice((0.0, 0.3, 1.0))
    return {name: drawn.choice((0.0, 0.5, 1.0, 1.0)) for name in names if drawn.random() < share}


def compared(
    device: torch.device, dtype: torch.dtype, paged: bool, seed: int, d: int = 24, kernels: bool | None = True
) -> int:
    """Sequences of random lengths, then random decode steps of some of them; gives how many gates were open. ``kernels`` as the
    bank has it, of the side that is compared with torch.
    """
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    modules = some_modules(drawn, d, drawn.choice((1, 5, 9)))
    count = drawn.choice((1, 4, 9))
    sides = [Side(device, modules, one, paged, count) for one in (False, kernels)]
    names = [one.name for one in modules]
    alike = drawn.random() < 0.3
    asked = [some_row(drawn, names[1:] if alike else names) for _ in range(count)]
    asked = [dict.fromkeys(names[1:], 1.0)] * count if alike else asked
    asked[0] = {**asked[0], names[1]: 1.0}
    lengths = [0] * count
    for step in range(STEPS):
        chosen = list(range(count)) if step == 0 else drawn.sample(range(count), drawn.randint(1, count))
        length = drawn.choice((0, 2, 37)) if step == 0 else 1
        if length == 0:
            continue
        starts = [lengths[i] for i in chosen]
        states = (torch.randint(-2, 3, (len(chosen), length, d), generator=generator) / 2).to(device, dtype)
        options: dict[str, Any] = {"phase": "decode" if step % 3 else "prefill"}
        if drawn.random() < 0.5:
            options["counts"] = torch.tensor([drawn.random() < 0.7 for _ in chosen], device=device)[:, None].expand(
                -1, length
            )
        wanted = drawn.random() < 0.5
        found = []
        for side in sides:
            record: Record | None = [] if wanted else None
            opened: list[Tensor] | None = [] if wanted else None
            found.append((_edited(side, asked, chosen, starts, states, options, record, opened), record, opened))
        (old, *others), (new, *theirs) = found
        _same(old, new, states.view(-1, d) if paged else states, others, theirs)
        for i in chosen:
            lengths[i] += length
    one, other = sides
    assert torch.equal(one.memory, other.memory) and one.bank.counts() == other.bank.counts()
    assert one.bank.looks() == other.bank.looks()
    return sum(opened for phases in other.bank.counts().values() for _, opened in phases.values())


def _edited(
    side: Side,
    asked: list[Mapping[str, float]],
    chosen: list[int],
    starts: list[int],
    states: Tensor,
    options: dict[str, Any],
    record: Record | None,
    opened: list[Tensor] | None,
) -> Edit:
    """As the engine does it: pages with flat states that are edited in place."""
    length, paged, told = states.shape[1], side.pages is not None, side.bank.requests
    selection = side.bank.select([asked[i] for i in chosen])
    assert selection is not None or not any(asked[i] for i in chosen)
    if selection is None:
        return Edit(states.view(-1, states.shape[-1]) if paged else states, ())
    assert told is not None
    requests = told.rows([str(i // 2) for i in chosen])  # of some there are two answers
    rows = None if selection.rows == 1 else torch.arange(len(chosen), device=side.device)
    counts = options.get("counts")
    if paged:
        rows, requests = (None if one is None else one.repeat_interleave(length) for one in (rows, requests))
        counts = None if counts is None else counts.reshape(-1)
        states = states.view(-1, states.shape[-1])
    places = side.places(chosen, starts, length) if selection.remembers else None
    pass_ = Pass(rows, places, options["phase"], None, counts, record, opened, None, requests)
    to = states.clone() if paged else None
    return selection.edit(LAYER, states.clone(), pass_, to, in_place=paged)


def _same(old: Edit, new: Edit, states: Tensor, others: list[Any], theirs: list[Any]) -> None:
    assert old.totals() == new.totals()
    close = ROUNDING[states.dtype] * max(1.0, float((old.states.float() - states.float()).abs().max()))
    assert torch.allclose(new.states.float(), old.states.float(), rtol=0, atol=close)
    still = (old.states == states).all(-1)
    assert torch.equal(new.states[still], states[still])
    (record, opened), (recorded, open_too) = others, theirs
    if record is not None:
        assert [names for names, _ in record] == [names for names, _ in recorded]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(record, recorded, strict=True))
        assert len(opened) == len(open_too) and all(torch.equal(a, b) for a, b in zip(opened, open_too, strict=True))
