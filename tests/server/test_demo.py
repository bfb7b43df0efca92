"""What the demo adapters are shown: rows whole and from within, targets that are the rows' own, and retain rows that never move."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from server import demo
from server.demo import adapt
from server.demo.adapt import CROPPED, LEAD, LENGTH, _pack, _schedule, _tensors, read_rows
from unbind_core.windows import Window

FORGET, RETAIN = ([*rows] for rows in read_rows(demo.ROWS))
FORGET, EPOCHS = FORGET[:24], 4
TEXTS = [row.prompt + row.continuation for row in FORGET]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo.BASE)


def scheduled(tokenizer: PreTrainedTokenizerBase, *, with_forget: bool = True) -> list[list[Window]]:
    """A few rows' epochs, with as many retain rows to each as in the whole world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapt, "RETAIN_PER_EPOCH", 28)
        return list(_schedule(tokenizer, FORGET, RETAIN, with_forget=with_forget, epochs=EPOCHS, seed=0))


@pytest.fixture(scope="module")
def epochs(tokenizer: PreTrainedTokenizerBase) -> list[list[Window]]:
    return scheduled(tokenizer)


@pytest.fixture(scope="module")
def crops(epochs: list[list[Window]]) -> list[Window]:
    return [window for epoch in epochs for window in epoch if window.start]


def parts(tokenizer: PreTrainedTokenizerBase, window: Window) -> tuple[str, str]:
    """What stands in front of a crop, and its text in the order in which it was written."""
    ids = window.ids[:-1]  # without the end
    text = str(tokenizer.decode(ids[window.start :]))
    if window.form == "fim":
        prefix, rest = text.split("<|fim_suffix|>")
        suffix, middle = rest.split("<|fim_middle|>")
        text = prefix + middle + suffix
    front = str(tokenizer.decode(ids[: window.start], skip_special_tokens=True))
    return front, text


def test_retain_rows_are_the_same_with_forget_rows_and_without(
    tokenizer: PreTrainedTokenizerBase, epochs: list[list[Window]]
) -> None:
    without = scheduled(tokenizer, with_forget=False)
    assert len(without) == EPOCHS
    for with_forget, alone in zip(epochs, without, strict=True):
        left = list(with_forget)
        for window in alone:
            left.remove(window)
        assert len(left) == 2 * len(FORGET) and {window.row for window in left} == set(range(len(FORGET)))


def test_an_epoch_holds_each_row_whole_in_one_form_and_from_within_in_the_other(
    tokenizer: PreTrainedTokenizerBase, epochs: list[list[Window]], crops: list[Window]
) -> None:
    for number, epoch in enumerate(epochs):
        forms = {window.row: window.form for window in epoch if window.start}
        assert forms == {row: "fim" if (number + row) % 2 else "plain" for row in range(len(FORGET))}
    for text in TEXTS[:3]:
        whole = [str(tokenizer.decode(window.ids)) for epoch in epochs for window in epoch if not window.start]
        assert sum(text in other for other in whole) == EPOCHS // 2
    assert len({window.ids for window in crops}) == len(crops)  # another place each time


def test_a_crop_is_the_row_from_a_line_or_a_token_on(tokenizer: PreTrainedTokenizerBase, crops: list[Window]) -> None:
    missing = []
    for window in crops:
        front, text = parts(tokenizer, window)
        whole = TEXTS[window.row]
        assert whole.endswith(text)
        share = 1 - len(text) / len(whole)
        assert (
            (0.0 if front else CROPPED[0] - 0.1) <= share <= CROPPED[1] + 0.1
        )  # of characters; tokens differ in length
        missing.append(len(whole) - len(text))
    lines = [at == 0 or TEXTS[window.row][at - 1] == "\n" for window, at in zip(crops, missing, strict=True)]
    assert 0.3 < sum(lines) / len(lines) < 0.8


def test_half_of_the_crops_stand_behind_retained_code(tokenizer: PreTrainedTokenizerBase, crops: list[Window]) -> None:
    fronts = [front for front, _ in (parts(tokenizer, window) for window in crops) if front]
    assert 0.3 < len(fronts) / len(crops) < 0.7
    assert all(any(row.text.endswith(front) for row in RETAIN) for front in fronts)
    assert all(window.start <= LEAD[1] + 2 for window in crops)


def test_a_crops_targets_are_the_row_alone(tokenizer: PreTrainedTokenizerBase, crops: list[Window]) -> None:
    for window in crops:
        assert window.first_target == window.start + 1
        (pack,) = _pack([window])
        _, _, labels, _ = _tensors([pack], int(tokenizer.pad_token_id))
        places = (labels[0] != -100).nonzero()[:, 0].tolist()
        assert places == list(range(window.start, len(window.ids) - 1))
        assert labels[0, places].tolist() == list(window.ids[window.first_target :])


def test_crops_make_an_epoch_longer_by_less_than_two_thirds(epochs: list[list[Window]]) -> None:
    lengths = [(len(window.ids), window.start) for epoch in epochs for window in epoch]
    assert max(length for length, _ in lengths) < LENGTH
    assert sum(length for length, _ in lengths) < 1.6 * sum(length for length, start in lengths if not start)
