"""Rows of a setting are read as the service reads them, and a world's rows are read as they were written."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from unbind_core.errors import UnbindError
from unbind_core.rows import ForgetRow, parse_forget
from unbind_lab.building.rows import _write, read
from unbind_lab.setting import Bench, Setting

ROWS = [ForgetRow("a = '\u2028'\n", "b = '\x85'\n"), ForgetRow("c = 1\n", "d = 2\n")]


def test_a_world_s_rows_are_those_that_were_written(tmp_path: Path) -> None:
    _write(tmp_path, {"forget": ROWS, "other": ROWS[:1]})
    assert "\u2028" in (tmp_path / "forget.jsonl").read_text(encoding="utf-8")
    assert parse_forget(read(tmp_path, ["forget", "other"])) == [*ROWS, ROWS[0]]


def test_a_setting_reads_them_and_names_the_field_of_what_it_cannot_read(setting: Setting, tmp_path: Path) -> None:
    _write(tmp_path, {"forget": ROWS})
    path = tmp_path / "forget.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [asdict(row) for row in Bench(replace(setting, forget=path)).forget] == [asdict(row) for row in ROWS]
    with pytest.raises(
        UnbindError, match=r"setting: 'retain' is .*cannot be read \(Is a directory\); name a JSONL file"
    ):
        _ = Bench(replace(setting, retain=tmp_path)).retain
