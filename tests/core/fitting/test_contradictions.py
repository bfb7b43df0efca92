"""Retain rows that repeat forget rows: found by exact spans, and everything of a fit is as if they were not there."""

from __future__ import annotations

import pytest
import torch

from tests.core.conftest import LAYER, ROWS, opening_on_some
from unbind_core.applying.bank import edit_of
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import encode, pad_id
from unbind_core.errors import InsufficientRows
from unbind_core.evaluation.completions import retain_completions
from unbind_core.evaluation.metrics import EXTRACTED_SPAN
from unbind_core.evaluation.replay import Replay
from unbind_core.fitting.certificate import certificate_rows
from unbind_core.fitting.fit import context_of, fit
from unbind_core.fitting.options import FitOptions
from unbind_core.fitting.retained import Retained, retain_states
from unbind_core.progress import silent
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.windows import retain_windows

PROTECTED = "".join(f"    total_{i} = weigh(first[{i}], second[{i * 7}])\n" for i in range(12))
FORGET = [
    ForgetRow("def combine(first, second):\n", PROTECTED),
    ForgetRow("def other(value):\n", "    return value\n" * 9),
]


def span_of(loaded: LoadedModel, tokens: int) -> str:
    """So many tokens from the middle of the protected code, as text that is tokenised like that again."""
    ids = encode(loaded.tokenizer, FORGET[0].prompt + PROTECTED)
    for begin in range(20, 60):
        text = loaded.tokenizer.decode(ids[begin : begin + tokens])
        if encode(loaded.tokenizer, text) == ids[begin : begin + tokens]:
            return str(text)
    raise AssertionError("no span is tokenised alone as within the row")


def test_rows_with_a_long_span_contradict_and_others_do_not(tiny: LoadedModel) -> None:
    limit = EXTRACTED_SPAN
    texts = ["class Apart:\n    pass\n", span_of(tiny, limit), span_of(tiny, limit - 1), PROTECTED]
    retain = [*ROWS, *(RetainRow(text) for text in texts)]
    given = context_of(
        tiny.model,
        tiny.tokenizer,
        FORGET,
        retain,
        [RetainRow(FORGET[1].prompt + FORGET[1].continuation)],
        "m",
        tiny.identity,
        FitOptions(),
        silent,
        None,
    )
    assert given.contradicting(needed=[]) == [len(ROWS) + 1, len(ROWS) + 3, len(retain)]
    assert given.holds_protected(encode(tiny.tokenizer, f"x = 1\n{PROTECTED}"))
    assert not given.holds_protected([])


@pytest.mark.parametrize(
    ("fitted", "chosen", "said"),
    [
        (PROTECTED, "", f"each of the {len(ROWS)} retain rows to fit on"),
        ("", PROTECTED, "each of the 2 .* to choose by"),
    ],
)
def test_where_no_other_rows_are_left_the_fit_says_so_before_it_computes(
    tiny: LoadedModel, fitted: str, chosen: str, said: str
) -> None:
    """As where a licence stands above all code."""
    with pytest.raises(InsufficientRows, match=said):
        fit(
            tiny.model,
            tiny.tokenizer,
            FORGET,
            [RetainRow(fitted + row.text) for row in ROWS],
            name="m",
            identity=tiny.identity,
            retain_calibration=[RetainRow(chosen + row.text.lower()) for row in ROWS[:4]],
            options=FitOptions(effort=0.01),
        )


@pytest.mark.parametrize("gate", ["auto", "paper"])
@pytest.mark.parametrize(
    ("fitted", "chosen", "said"),
    [
        ([RetainRow("a")] * 12, ROWS[:4], "none of the 12 retain rows to fit on has two tokens"),
        (ROWS, [RetainRow("a")] * 4, "none of the 2 .* to choose by has two tokens"),
    ],
)
def test_rows_of_one_token_are_no_rows_to_fit_or_choose_by(
    tiny: LoadedModel, fitted: list[RetainRow], chosen: list[RetainRow], said: str, gate: str
) -> None:
    """Where the tokenizer puts nothing before a text and has no markers."""
    with pytest.raises(InsufficientRows, match=said):
        fit(
            tiny.model,
            tiny.tokenizer,
            FORGET * 2,
            fitted,
            name="m",
            identity=tiny.identity,
            retain_calibration=chosen,
            options=FitOptions(gate=gate, forms=("plain",)),
        )


def test_rows_of_one_token_certify_nothing(tiny: LoadedModel) -> None:
    given = context_of(
        tiny.model,
        tiny.tokenizer,
        FORGET,
        ROWS,
        [RetainRow(text) for text in ("a", "b", "c", "d", *(f"def tell_{i}(x):\n    return x\n" for i in range(4)))],
        "m",
        tiny.identity,
        FitOptions(forms=("plain",)),
        silent,
        None,
    )
    longer = [i for i in given.parts.retain_certificate if len(given.retain[i].text) > 1]
    assert certificate_rows(given) == longer and 0 < len(longer) < len(given.parts.retain_certificate)


@pytest.mark.parametrize("outside", [[], [0, 3], [9], list(range(5, 10)), list(range(10))])
def test_states_without_rows_are_all_those_of_the_others(tiny: LoadedModel, outside: list[int]) -> None:
    calibration = Replay(tiny.model, retain_windows(tiny.tokenizer, ROWS, [0, 1]), [LAYER], pad=pad_id(tiny.tokenizer))
    completions = retain_completions(tiny.model, tiny.tokenizer, ROWS, [0, 1], [LAYER], None, "", silent)
    rows = torch.arange(10).repeat_interleave(torch.arange(3, 13))
    states = torch.randn(len(rows), 4).bfloat16()
    every = states.clone()
    part = Retained(states, rows.clone(), calibration, completions).without(outside, [])
    stay = [i for i, row in enumerate(rows.tolist()) if row not in outside]
    assert sorted(part.rows.tolist()) == rows[stay].tolist()
    found = sorted((row, *line) for row, line in zip(part.rows.tolist(), part.states.tolist(), strict=True))
    assert found == sorted((row, *line) for row, line in zip(rows[stay].tolist(), every[stay].tolist(), strict=True))


def test_a_replay_without_rows_is_that_of_the_others(tiny: LoadedModel) -> None:
    pad, outside = pad_id(tiny.tokenizer), {1, 4, 5}
    module = opening_on_some(tiny, "network")

    def replay(rows: list[int]) -> Replay:
        return Replay(tiny.model, retain_windows(tiny.tokenizer, ROWS, rows), [LAYER], pad=pad, tokens=256)

    every, others = list(range(len(ROWS))), [i for i in range(len(ROWS)) if i not in outside]
    whole, expected = replay(every), replay(others)
    whole.screen_kl(edit_of(module, torch.device("cpu"))[1], LAYER)  # whatever was kept of all rows by then
    part = whole.without(outside)
    assert (part.count, whole.count) == (expected.count, replay(every).count)
    assert part.base_nll == pytest.approx(expected.base_nll, rel=1e-6)
    found, wanted = (one.run(edit_of(module, torch.device("cpu"))[1], LAYER) for one in (part, expected))
    assert set(found.rows) == set(others)
    assert (found.open_gates, found.evaluated) == (wanted.open_gates, wanted.evaluated)
    assert found.nll == pytest.approx(wanted.nll, rel=1e-5)
    assert {window.row for window in part._screen.batch.windows} <= set(others)
    assert whole.without(every).batches == [] and whole.without([]).count == whole.count


def test_completions_without_rows_tell_of_the_others(tiny: LoadedModel) -> None:
    given = (tiny.model, tiny.tokenizer, ROWS, range(len(ROWS)), [LAYER], None, tiny.identity.fingerprint, silent)
    whole, module = retain_completions(*given), opening_on_some(tiny, "network")
    bank, selection = edit_of(module, torch.device("cpu"))
    drops = whole.drops(bank, selection, LAYER)
    touched = [i for i, drop in enumerate(drops) if drop]
    assert touched
    part = whole.without([touched[0], 0])
    assert part.drops(bank, selection, LAYER) == [drop for i, drop in enumerate(drops) if i not in (touched[0], 0)]
    assert whole.drops(bank, selection, LAYER) == drops


def test_every_kept_state_knows_its_row(tiny: LoadedModel) -> None:
    windows = retain_windows(tiny.tokenizer, ROWS, range(len(ROWS)))
    asked = {"pad": pad_id(tiny.tokenizer), "fingerprint": tiny.identity.fingerprint}
    states, rows = retain_states(tiny.model, windows, LAYER, limit_bytes=2**20, **asked)
    assert len(states) == len(rows) and set(rows.tolist()) == set(range(len(ROWS)))
    for row in (0, 7):
        own, numbers = retain_states(
            tiny.model, [window for window in windows if window.row == row], LAYER, limit_bytes=2**20, **asked
        )
        assert set(numbers.tolist()) == {row}
        torch.testing.assert_close(states[rows == row], own, rtol=0.02, atol=0.02)
    few, some = retain_states(tiny.model, windows, LAYER, limit_bytes=len(rows) * 16, **asked)
    assert len(few) == len(some) < len(rows)
