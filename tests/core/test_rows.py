"""Rows, partitions and windows: the settled rules."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.conftest import build_tokenizer
from unbind_core.encoding import FIM_TEMPLATES, available_forms, beginning, encode, encode_prompt, fim_prompt
from unbind_core.errors import DataError, InsufficientRows
from unbind_core.rows import (
    ForgetRow,
    RetainRow,
    allot,
    forget_digest,
    forget_sizes,
    json_lines,
    make_partitions,
    parse_forget,
    parse_retain,
    split_text,
)
from unbind_core.windows import batches, fim_split, forget_windows, make_batch, retain_windows

TEXT = "def add(first, second):\n    total = first + second\n    print(total)\n    return total\n"


def rows(count: int, languages: tuple[str, ...] = ("python",)) -> list[ForgetRow]:
    return [ForgetRow(f"def f{i}(x):\n", f"    return x + {i}\n", languages[i % len(languages)]) for i in range(count)]


def retain(count: int, languages: tuple[str, ...] = ("python",)) -> list[RetainRow]:
    return [RetainRow(TEXT + f"# {i}\n", languages[i % len(languages)]) for i in range(count)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: a JSON object is needed, not list"),
        ('{"prompt": "x"}', "field 'continuation' is missing or empty"),
        ('{"code": "a = 1"}', "field 'prompt' is missing or empty; a row has 'prompt' and 'continuation', or 'text'"),
        ('{"prompt": 1, "continuation": "x"}', "field 'prompt' must be a string, not int"),
        ('{"text": "abc", "prompt": "x"}', "either 'text' or"),
        ('{"text": "a"}', "field 'text' is too short"),
        ('{"prompt": "a", "continuation": "b", "source": 3}', "field 'source' must be a string"),
        (r'{"prompt": "a", "continuation": "\ud800"}', "line 1: field 'continuation' holds half of a surrogate pair"),
        (r'{"text": "a = 1\nb = \udc00", "language": "c"}', "line 1: field 'text' holds half of a surrogate pair"),
    ],
)
def test_a_bad_forget_row_is_named_by_line_and_field(line: str, message: str) -> None:
    with pytest.raises(DataError, match=f"f.jsonl {message}" if message.startswith("line") else message):
        parse_forget([line], "f.jsonl")


def test_a_file_is_read_by_line_feeds_alone_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    rows = [ForgetRow("a = '\u2028'\n", "b = '\x85\x0b'"), ForgetRow("prompt", "\u2029 é")]
    lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
    assert len("\n".join(lines).splitlines()) > 2
    path = tmp_path / "rows.jsonl"
    for start in ("", "\ufeff"):
        for end in ("\n", "\r\n", "\n\n"):
            path.write_bytes((start + end.join([*lines, ""])).encode())
            assert parse_forget(path) == rows == parse_forget(json_lines(path.read_bytes(), "r"))
    path.write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl: not UTF-8 \(byte 24\); save it as UTF-8"):
        parse_retain(path)
    path.write_bytes(b'{"text": "x"}\n{}\n')
    with pytest.raises(DataError, match=r"rows.jsonl line 2: field 'text' is missing"):
        parse_retain(path)
    path.write_bytes(b'{"text": "x"}\n{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(DataError, match=r"line 3: field 'text' holds half of a surrogate pair, .*; mend its encoding"):
        parse_retain(path)
    path.write_bytes(b'{"text": "x"}\n{}\n')
    with pytest.raises(DataError, match="mine line 2"):
        parse_retain(path, "mine")
    with pytest.raises(IsADirectoryError):
        parse_retain(tmp_path)


@pytest.mark.parametrize("parse", [parse_forget, parse_retain])
def test_the_name_of_a_file_is_not_taken_for_its_lines(parse: Callable[[Any], object]) -> None:
    with pytest.raises(DataError, match=r"'rows.jsonl' is a string; give a file as Path"):
        parse("rows.jsonl")


def test_blank_lines_are_skipped_and_counted() -> None:
    assert parse_retain(["", '{"text": "x = 1"}'], "r") == [RetainRow("x = 1")]
    with pytest.raises(DataError, match="r line 3: field 'text' is missing"):
        parse_retain(["", '{"text": "x"}', "{}"], "r")


@given(st.text(min_size=2).filter(lambda t: len(t.strip()) > 1))
def test_splitting_a_text_loses_nothing_and_leaves_both_parts(text: str) -> None:
    prompt, continuation = split_text(text)
    assert prompt + continuation == text
    assert prompt
    assert continuation


@given(st.text(alphabet=" \n\tab", max_size=40))
def test_a_row_that_was_taken_is_kept_and_read_again(text: str) -> None:
    try:
        taken = parse_forget([json.dumps({"text": text})])
    except DataError:
        return
    assert taken[0].prompt + taken[0].continuation == text
    assert parse_forget([json.dumps(asdict(row)) for row in taken]) == taken


def test_a_text_that_begins_with_blank_lines_is_cut_in_its_code() -> None:
    assert split_text("\n" * 40 + TEXT) == ("\n" * 40 + split_text(TEXT)[0], split_text(TEXT)[1])


def test_a_text_is_split_at_the_first_line_end_after_a_quarter() -> None:
    assert split_text(TEXT)[0] == "def add(first, second):\n"


def test_the_papers_300_rows_split_240_50_10() -> None:
    assert forget_sizes(300) == (240, 50, 10)


@given(st.integers(3, 400), st.integers(0, 5))
def test_partitions_are_disjoint_cover_every_row_and_depend_on_the_seed_alone(count: int, seed: int) -> None:
    forget, kept = rows(count, ("go", "python")), retain(30)
    parts = make_partitions(forget, kept, seed)
    assert sorted(parts.forget_fit + parts.forget_calibration + parts.forget_validation) == list(range(count))
    assert parts.forget_fit and parts.forget_calibration and parts.forget_validation
    assert parts == make_partitions(forget, kept, seed)
    retained = (*parts.retain_fit, *parts.retain_calibration, *parts.retain_certificate)
    assert sorted(retained) == list(range(30)) and all(parts.to_json().values())


def test_retain_rows_are_limited_and_split_80_20_in_proportion_to_language() -> None:
    kept = retain(1000, ("go", "python", "python", "python"))
    parts = make_partitions(rows(30), kept, 0, 600, certify=False)
    assert (len(parts.retain_fit), len(parts.retain_calibration), parts.retain_certificate) == (480, 120, ())
    assert Counter(kept[i].language for i in parts.retain_calibration) == {"go": 30, "python": 90}


def test_half_of_the_calibration_rows_choose_and_half_certify_in_proportion_to_language() -> None:
    kept = retain(1000, ("go", "python", "python", "python"))
    whole, parts = (make_partitions(rows(30), kept, 0, 600, certify=certify) for certify in (False, True))
    assert parts.retain_fit == whole.retain_fit
    assert sorted((*parts.retain_calibration, *parts.retain_certificate)) == list(whole.retain_calibration)
    for part in (parts.retain_calibration, parts.retain_certificate):
        assert Counter(kept[i].language for i in part) == {"go": 15, "python": 45}


def test_rows_given_for_calibration_are_those_that_choose_and_certify() -> None:
    kept = retain(1000)
    parts = make_partitions(rows(30), kept, 0, 2500, set_apart=150)
    assert parts.retain_fit == tuple(range(850))
    assert sorted((*parts.retain_calibration, *parts.retain_certificate)) == list(range(850, 1000))
    assert len(parts.retain_certificate) == 75
    many = make_partitions(rows(30), kept, 0, 500, set_apart=600)
    assert len(many.retain_calibration) == len(many.retain_certificate) == 150


def test_the_retain_rows_drawn_do_not_depend_on_the_forget_set() -> None:
    kept = retain(100)
    first, second = (make_partitions(rows(count), kept, 0, 50) for count in (5, 40))
    assert first.retain_fit == second.retain_fit
    assert first.retain_calibration == second.retain_calibration


def test_a_forget_set_too_small_says_how_many_rows_are_needed() -> None:
    with pytest.raises(InsufficientRows, match="2 rows; at least 3"):
        make_partitions(rows(2), retain(30))


@pytest.mark.parametrize(("set_apart", "limit"), [(30, 600), (0, 1)])
def test_retain_rows_of_which_none_is_left_to_fit_on_are_too_few(set_apart: int, limit: int) -> None:
    with pytest.raises(InsufficientRows, match="none of the 30 retain rows is left to fit on"):
        make_partitions(rows(5), retain(30), 0, limit, set_apart)
    assert make_partitions(rows(5), retain(31), 0, limit + 1, set_apart).retain_fit


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), min_size=1), st.data())
def test_allotment_adds_up_and_never_strays_by_a_whole_row(sizes: dict[str, int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(sizes.values())))
    given_rows = allot(sizes, total)
    assert sum(given_rows.values()) == total
    for name, size in sizes.items():
        assert abs(given_rows[name] - total * size / sum(sizes.values())) < 1
        assert given_rows[name] <= size


def test_allotment_ties_go_by_name() -> None:
    assert allot({"b": 1, "a": 1}, 1) == {"a": 1, "b": 0}


def test_only_continuation_tokens_are_targets_and_the_last_prompt_state_predicts_the_first() -> None:
    tokenizer = build_tokenizer(bos=True)
    row = ForgetRow("def f(x):\n", "    return x\n")
    (window,) = forget_windows(tokenizer, [row], [0])
    assert list(window.ids) == encode_prompt(tokenizer, row.prompt) + encode(tokenizer, row.continuation)
    batch = make_batch([window], 0)
    assert batch.next_tokens().tolist() == encode(tokenizer, row.continuation)
    assert int(batch.predictors[0].nonzero()[0]) == len(encode_prompt(tokenizer, row.prompt)) - 1


@pytest.mark.parametrize("bos", [True, False])
def test_every_retain_token_but_the_first_of_a_window_is_a_target(bos: bool) -> None:
    tokenizer = build_tokenizer(bos=bos)
    (window,) = retain_windows(tokenizer, [RetainRow(TEXT)], [0])
    assert window.first_target == 1
    assert list(window.ids) == beginning(tokenizer) + encode(tokenizer, TEXT)


@given(st.integers(2, 40), st.integers(4, 20))
def test_long_rows_become_windows_that_do_not_overlap(lines: int, limit: int) -> None:
    tokenizer = build_tokenizer(bos=True)
    row = ForgetRow("x = 1\n", "".join(f"y = {i}\n" for i in range(lines)))
    windows = forget_windows(tokenizer, [row], [0], ("plain",), limit)
    assert all(len(w.ids) <= limit and w.ids[0] == tokenizer.bos_token_id for w in windows)
    targets = [t for w in windows for t in w.ids[w.first_target :]]
    assert targets == encode(tokenizer, row.continuation)


def test_fill_in_the_middle_windows_hold_prefix_suffix_and_middle_in_the_tokenizers_order() -> None:
    tokenizer = build_tokenizer()
    row = ForgetRow("def add(first, second):\n", TEXT.split("\n", 1)[1])
    prefix, suffix, middle = fim_split(row)
    assert prefix + middle + suffix == TEXT
    assert suffix
    (window,) = forget_windows(tokenizer, [row], [0], ["fim"])
    prompt = fim_prompt(tokenizer, prefix, suffix)
    assert prompt is not None
    assert list(window.ids) == prompt + encode(tokenizer, middle)
    assert window.first_target == len(prompt)
    names = [tokenizer.convert_ids_to_tokens(i) for i in prompt if i < 8]
    assert [n for n in names if "fim" in n] == [part for part in FIM_TEMPLATES[0] if "fim" in part]


def test_a_form_the_tokenizer_lacks_is_refused_with_the_remedy() -> None:
    tokenizer = build_tokenizer()
    assert available_forms(tokenizer) == ("plain", "fim")
    with pytest.raises(DataError, match="'spm' is unknown"):
        available_forms(tokenizer, ["spm"])


def test_batches_keep_every_window_and_the_token_limit() -> None:
    tokenizer = build_tokenizer()
    windows = retain_windows(tokenizer, retain(40), range(40), ["plain", "fim"])
    made = list(batches(windows, 0, tokens=200))
    assert sorted(w.ids for b in made for w in b.windows) == sorted(w.ids for w in windows)
    assert all(b.ids.numel() <= 200 or len(b.windows) == 1 for b in made)


def test_the_digest_of_a_forget_set_depends_on_content_and_order() -> None:
    first = rows(3)
    assert forget_digest(first) == forget_digest([ForgetRow(**json.loads(json.dumps(r.__dict__))) for r in first])
    assert forget_digest(first) != forget_digest(first[::-1])
