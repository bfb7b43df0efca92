"""Gates that remember decide as a plain loop over the whole sequence would, however the sequence reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.conftest import bank_of, edit, make_module, make_network_module, select
from unbind_core.applying.gate_memory import GateMemory, SlotPlaces
from unbind_core.applying.gates import windowed
from unbind_core.applying.networks import CLIP, GRAIN
from unbind_core.applying.selection import Selection
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule

D, LAYER, LENGTH = 16, 1, 40
MODEL = ModelIdentity("f" * 64, "tiny", D, 4)


def module(name: str = "a", seed: int = 0, **changes: Any) -> UnbindModule:
    return make_network_module(MODEL, name, LAYER, seed=seed, **changes)


def states(*shape: int, seed: int = 7) -> Tensor:
    """Multiples of 1/2: products with a module's numbers and their sums are exact in FP32, in any order."""
    return torch.randint(-2, 3, (*shape, D), generator=torch.Generator().manual_seed(seed)) / 2


def by_hand(one: UnbindModule, sequence: Tensor) -> list[bool]:
    """Where the gate is open in a sequence [T,d], by a loop in FP64."""
    b, heads, heads_b = one.network
    scores = (sequence.double() @ one.w.double().T + b.double()).relu() @ heads.double().T + heads_b.double()
    limit = CLIP * GRAIN
    z = [[round(min(max((f - one.s_ref) * GRAIN / one.tau, -limit), limit)) for f in line] for line in scores.tolist()]
    close = one.tau if one.tau_close is None else one.tau_close
    gate, found = False, []

    def mean(t: int, window: int) -> float:
        last = z[max(one.first, t - window + 1) : t + 1]
        return max(map(sum, zip(*last, strict=True)), default=0) / max(len(last), one.least) / GRAIN

    for t in range(len(z)):
        stays = any(mean(t, window) >= close / one.tau for window in (one.window, one.hold or one.window))
        gate = mean(t, one.window) >= 1 or (gate and stays)
        found.append(gate)
    return found


def edited_by_hand(wanted: Sequence[tuple[UnbindModule, float]], sequence: Tensor) -> Tensor:
    """The edited states [T,d] in FP64."""
    edited = sequence.double()
    for one, strength in wanted:
        edited = edited - torch.tensor(by_hand(one, sequence)).double()[:, None] * one.kappa * strength * one.v.double()
    return edited


MODULES = {
    "a": module("a", hold=20),
    "b": module("b", seed=1, heads=1, window=9, s_ref=0.5, tau_close=None, first=3, least=4),
    "c": module("c", seed=2, window=1, s_ref=1.0, tau=2.0, tau_close=0.0),
    "d": make_module(MODEL, "d", LAYER, seed=3, s_ref=0.0, tau=0.5, kappa=2.0),
}
ROWS = ({"a": 1.0, "b": 0.5}, {}, {"c": 1.0}, {"a": 2.0, "c": 1.0})


def in_steps(
    selection: Selection,
    sequences: Sequence[Tensor],
    cuts: Sequence[Sequence[int]],
    left: bool,
    memory: GateMemory,
    slots: Sequence[int],
) -> list[Tensor]:
    """Every row's edited states, where row i takes ``cuts[i][n]`` states in pass n, padded on one side."""
    parts: list[list[Tensor]] = [[] for _ in sequences]
    starts = [0] * len(sequences)
    for counts in zip(*cuts, strict=True):
        width = max(counts)
        if not width:
            continue
        batch = torch.full((len(sequences), width, D), 37.0)  # padding would open every gate
        positions = torch.full((len(sequences), width), memory.length)
        spans = [slice(width - count, width) if left else slice(0, count) for count in counts]
        for i, (count, span) in enumerate(zip(counts, spans, strict=True)):
            batch[i, span] = sequences[i][starts[i] : starts[i] + count]
            positions[i, span] = torch.arange(starts[i], starts[i] + count)
        places = SlotPlaces(memory, torch.tensor(slots), positions, torch.tensor(starts))
        real = positions < memory.length
        counted = None if bool(real.all()) else real
        edited = edit(selection, LAYER, batch, phase="prefill" if width > 1 else "decode", real=counted, places=places)
        for i, (count, span) in enumerate(zip(counts, spans, strict=True)):
            parts[i].append(edited[i, span])
            starts[i] += count
    return [torch.cat(part) for part in parts]


def test_a_whole_sequence_is_edited_as_the_loop_says() -> None:
    sequences = states(4, LENGTH)
    edited = edit(select(bank_of(*MODULES.values()), *ROWS), LAYER, sequences)
    for row, wanted in enumerate(ROWS):
        expected = edited_by_hand([(MODULES[name], strength) for name, strength in wanted.items()], sequences[row])
        torch.testing.assert_close(edited[row].double(), expected, atol=1e-5, rtol=1e-5)
    for name in "abc":  # each of these gates says something
        assert 0 < sum(by_hand(MODULES[name], sequences.view(-1, D)[:LENGTH])) < LENGTH


def compositions(total: int, passes: int) -> st.SearchStrategy[list[int]]:
    """``passes`` numbers, zeros among them, that add up to ``total``."""
    edges = st.lists(st.integers(0, total), min_size=passes - 1, max_size=passes - 1).map(sorted)
    return edges.map(lambda at: [end - start for start, end in zip([0, *at], [*at, total], strict=True)])


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[list[list[int]], bool]:
    """How four sequences of different lengths are cut into the same number of passes, and the side of the padding."""
    passes = draw(st.sampled_from([1, 2, 5, 16]))
    lengths = [draw(st.integers(1, LENGTH)) for _ in ROWS]
    return [draw(compositions(length, passes)) for length in lengths], draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(cuttings())
def test_the_same_sequence_gets_the_same_edits_however_it_is_cut(how: tuple[list[list[int]], bool]) -> None:
    cuts, left = how
    sequences = [states(sum(cut), seed=i) for i, cut in enumerate(cuts)]
    bank = bank_of(*MODULES.values())
    found = in_steps(select(bank, *ROWS), sequences, cuts, left, GateMemory(6, LENGTH), [4, 0, 5, 2])
    for row, wanted in enumerate(ROWS):
        whole = edit(select(bank, wanted, {}), LAYER, sequences[row].expand(2, -1, -1))[0] if wanted else sequences[row]
        torch.testing.assert_close(found[row], whole)


@pytest.mark.parametrize("left", [False, True])
def test_one_by_one_and_in_chunks_are_bit_for_bit_the_whole(left: bool) -> None:
    """With padding inside of chunks as well: a pass in which some row has nothing to add."""
    sequences = list(states(4, LENGTH))
    selection = select(bank_of(*MODULES.values()), *ROWS)
    whole = edit(selection, LAYER, torch.stack(sequences))
    one_by_one = in_steps(selection, sequences, [[1] * LENGTH] * 4, left, GateMemory(4, LENGTH), range(4))
    ragged = [[16, 16, 8, 0], [3, 30, 0, 7], [40, 0, 0, 0], [0, 0, 1, 39]]
    for found in (one_by_one, in_steps(selection, sequences, ragged, left, GateMemory(4, LENGTH), range(4))):
        assert torch.equal(torch.stack(found), whole)


def test_padding_inside_a_whole_sequence_is_not_there() -> None:
    real = torch.rand(3, 20, generator=torch.Generator().manual_seed(5)) > 0.4
    sequences = states(3, 20)
    selection = select(bank_of(*MODULES.values()), {"a": 1.0, "b": 1.0, "c": 1.0})
    found = edit(selection, LAYER, sequences, real=real)
    for row in range(3):
        alone = edit(selection, LAYER, sequences[row : row + 1, real[row]])
        assert torch.equal(found[row, real[row]], alone[0])


def test_window_1_with_one_head_and_one_threshold_is_a_plain_threshold() -> None:
    one = module(heads=1, window=1, tau_close=None)
    sequence = states(1, 200)
    b, heads, heads_b = one.network
    f = (sequence[0] @ one.w.T + b).relu() @ heads.T + heads_b
    plain = f[:, 0] >= one.s_ref + one.tau
    assert 0 < int(plain.sum()) < 200
    changed = (edit(select(bank_of(one), {"a": 1.0}), LAYER, sequence) != sequence).any(-1)[0]
    assert torch.equal(changed, plain)


def test_an_open_gate_acts_with_its_whole_strength_whatever_the_score() -> None:
    one = module(tau_close=None, window=1)
    sequence = states(1, 100)
    change = sequence - edit(select(bank_of(one), {"a": 0.5}), LAYER, sequence)
    sizes = change.norm(dim=-1)[0]
    opened = torch.tensor(by_hand(one, sequence[0]))
    torch.testing.assert_close(sizes[opened], torch.full((int(opened.sum()),), 0.5 * one.kappa), atol=1e-5, rtol=1e-5)
    assert not bool(sizes[~opened].any())


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30), st.booleans())
def test_two_thresholds_are_a_latch(steps: list[tuple[bool, bool]], before: bool) -> None:
    opens = [set_ and not reset for set_, reset in steps]
    closes = [reset for _, reset in steps]
    state, expected = before, []
    for set_, reset in zip(opens, closes, strict=True):
        state = set_ or (state and not reset)
        expected.append(state)
    places = SlotPlaces.afresh(1, len(steps), None, torch.device("cpu"))
    columns = [torch.tensor(part).unsqueeze(1) for part in (opens, closes)]
    assert places.held(columns[0], columns[1], torch.tensor([[before]]))[:, 0].tolist() == expected


@settings(deadline=None)
@given(
    st.integers(1, 9), st.integers(0, 5), st.integers(1, 9), st.lists(st.integers(-2048, 2048), min_size=1, max_size=40)
)
def test_the_windowed_mean_is_the_mean_of_the_last_scores(window: int, first: int, least: int, line: list[int]) -> None:
    parts = [line[max(first, t - window + 1) : t + 1] for t in range(len(line))]
    expected = torch.tensor([sum(part) / max(len(part), least) / GRAIN for part in parts])
    scores, seen = torch.tensor(line).view(1, -1, 1) / GRAIN, torch.arange(1, len(line) + 1)
    assert torch.equal(windowed(scores, window, seen, first, least)[0, :, 0], expected)


def test_windowed_means_stay_exact_in_long_sequences() -> None:
    z = torch.randint(1000, 2049, (1, 30_000, 2), generator=torch.Generator().manual_seed(0)) / GRAIN
    seen = torch.arange(1, z.shape[1] + 1)
    for window in (2, 16, 256):
        parts = torch.nn.functional.pad(z, (0, 0, window - 1, 0)).unfold(1, window, 1)
        assert torch.equal(
            windowed(z, window, seen), parts.double().sum(-1).div(seen.clamp(max=window)[:, None]).float()
        )


FIELDS = ("heads", "width", "window", "first", "hold")
SIZES = st.tuples(*map(st.sampled_from, ([1, 2, 3, 5], [5, 7, 9], [1, 3, 8], [0, 2, 5], [None, 9, 24])))


@settings(max_examples=25, deadline=None)
@given(st.lists(SIZES, min_size=2, max_size=6))
def test_modules_of_any_sizes_together_decide_as_each_alone(sizes: list[tuple[int | None, ...]]) -> None:
    """However they are padded to be stacked."""
    every = {}
    for i, size in enumerate(sizes):
        changes: dict[str, Any] = dict(zip(FIELDS, size, strict=True))
        least = min(changes["window"], 1 + changes["first"])
        every[f"m{i}"] = module(f"m{i}", seed=i, least=least, **changes)
    bank, sequences = bank_of(*every.values()), states(2, LENGTH)
    record: list[tuple[tuple[str, ...], Tensor]] = []
    edit(select(bank, dict.fromkeys(every, 0.0)), LAYER, sequences, record=record)
    found = {name: table[..., i] for names, table in record for i, name in enumerate(names)}
    assert sorted(found) == sorted(every)
    for name, one in every.items():
        opened = found[name] > 0  # an open gate's evidence is above its lower threshold
        assert opened.tolist() == [by_hand(one, sequence) for sequence in sequences]


def test_a_row_without_modules_keeps_every_bit_and_no_strength_changes_none() -> None:
    bank = bank_of(*(module(name, seed=i, kappa=1e4) for i, name in enumerate("ab")))
    sequences = states(3, LENGTH)
    mixed = edit(select(bank, {"a": 1.0}, {}, {"a": 0.0, "b": 1.0}), LAYER, sequences)
    assert torch.equal(mixed[1], sequences[1]) and not torch.equal(mixed[0], sequences[0])
    before = bank.counts()
    assert torch.equal(edit(select(bank, {"a": 0.0}), LAYER, sequences), sequences)
    assert torch.equal(edit(select(bank_of(module(kappa=0.0)), {"a": 1.0}), LAYER, sequences), sequences)
    after = bank.counts()
    opened = sum(sum(by_hand(bank["a"], sequence)) for sequence in sequences)
    assert after["a"]["prefill"][0] - before["a"]["prefill"][0] == 3 * LENGTH
    assert after["a"]["prefill"][1] - before["a"]["prefill"][1] == opened > 0


def test_a_row_without_modules_is_not_harmed_by_states_that_are_not_finite() -> None:
    sequences = states(2, 10)
    sequences[1, 4, 2] = float("inf")
    edited = edit(select(bank_of(module()), {"a": 1.0}, {}), LAYER, sequences)
    assert torch.equal(edited[1], sequences[1])
    assert bool(torch.isfinite(edited[0]).all())


def test_modules_of_both_kinds_read_the_unmodified_states_in_any_order() -> None:
    sequences = states(2, LENGTH)
    names = {"a": 1.0, "c": 2.0, "d": 1.0}
    chosen = [MODULES[name] for name in names]
    found = edit(select(bank_of(*chosen), names, names), LAYER, sequences)
    assert torch.equal(edit(select(bank_of(*reversed(chosen)), names, names), LAYER, sequences), found)
    alone = sum(
        sequences - edit(select(bank_of(MODULES[name]), {name: names[name]}), LAYER, sequences) for name in names
    )
    torch.testing.assert_close(sequences - found, alone, atol=1e-5, rtol=1e-5)
    linear = sequences - edit(select(bank_of(MODULES["d"]), {"d": 1.0}), LAYER, sequences)
    assert bool(linear.any()) and not torch.allclose(found, sequences - linear)


def test_counts_are_those_of_the_loop_by_phase() -> None:
    sequences = list(states(3, 20))
    bank = bank_of(MODULES["a"], MODULES["c"])
    selection = select(bank, {"a": 1.0}, {}, {"a": 1.0, "c": 1.0})
    in_steps(
        selection, sequences, [[5, 7] + [1] * 8, [1, 11] + [1] * 8, [9, 3] + [1] * 8], True, GateMemory(3, 20), range(3)
    )
    for name, rows in (("a", (0, 2)), ("c", (2,))):
        gates = [by_hand(MODULES[name], sequences[row]) for row in rows]
        assert bank.counts()[name] == {
            "prefill": (12 * len(rows), sum(sum(gate[:12]) for gate in gates)),
            "decode": (8 * len(rows), sum(sum(gate[12:]) for gate in gates)),
        }


def test_single_states_are_refused_where_a_gate_has_a_memory() -> None:
    with pytest.raises(ValueError, match="need places"):
        edit(select(bank_of(module()), {"a": 1.0}), LAYER, states(5), rows=torch.zeros(5, dtype=torch.int64))


def test_only_a_selection_with_such_a_gate_asks_where_its_rows_stand() -> None:
    bank = bank_of(MODULES["a"], MODULES["d"])
    assert select(bank, {"d": 1.0}, {"a": 1.0}).remembers
    assert not select(bank, {"d": 1.0}, {}).remembers
