"""A setting's file that says something else than it may is refused, with the field, before anything is made or measured; its rows
are read as the service reads them, and a world's as they were written.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import build
from unbind_core.errors import UnbindError
from unbind_core.rows import ForgetRow, parse_forget
from unbind_lab.building.rows import _write, read
from unbind_lab.setting import Bench, Setting

ROWS = [ForgetRow("a = '\u2028'\n", "b = '\x85'\n"), ForgetRow("c = 1\n", "d = 2\n")]

WRONG = {
    "retain_rows": ('"100"', "0", "-3", "2.5", "true"),
    "rows_an_update": ("0",),
    "learning_rates": ("1e-4", "[]", '["1e-4"]', "[0.0]", "[inf]"),
    "updates": ("[-1]", "[1.5]"),
    "seed": ('"a"', "1.5"),
    "full": ("5", "[]"),
    "evalplus": ("5",),
    "modules": ("[]", "{ rewrite = 3 }"),
    "name": ("5", '"../elsewhere"', '".."', '""'),
}


def own(folder: Path, **values: str) -> Path:
    """A setting of one's own, whose paths need not be there."""
    paths = (
        "base",
        "full",
        "retrained",
        "forget",
        "retain",
        "retain_training",
        "forget_validation",
        "retain_validation",
    )
    given = {**{name: f'"{name}.jsonl"' for name in paths}, **values}
    path = folder / "own.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in given.items()), encoding="utf-8")
    return path


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_that_makes_no_sense_is_named(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(UnbindError, match=rf"setting: '{key}' in .*own.toml is .*; give "):
        Setting.load(str(own(tmp_path, **{key: value})))


def test_what_makes_sense_is_taken(tmp_path: Path) -> None:
    found = Setting.load(
        str(
            own(
                tmp_path,
                seed="-1",
                learning_rates="[1, 0.5]",
                name='"mine"',
                modules='{ rewrite = "a" }',
                evalplus='"e"',
            )
        )
    )
    assert (found.seed, found.learning_rates, found.name) == (-1, (1, 0.5), "mine")
    assert found.modules["rewrite"] == tmp_path / "a" and found.evalplus == tmp_path / "e"


def test_a_file_that_is_not_utf8_or_a_folder_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'base = "\xe9"\n')
    with pytest.raises(UnbindError, match="is not TOML"):
        Setting.load(str(path))
    with pytest.raises(UnbindError, match="neither a file nor one of demo, demo-seed-1, nor"):
        Setting.load(str(tmp_path))


@pytest.mark.parametrize("field", ["forget", "retain", "retain_training", "forget_validation", "retain_validation"])
def test_rows_that_are_none_are_refused(tmp_path: Path, field: str) -> None:
    (tmp_path / f"{field}.jsonl").write_text("\n")
    bench = Bench(Setting.load(str(own(tmp_path))))
    with pytest.raises(UnbindError, match=rf"setting: '{field}' is .*, which holds no row"):
        getattr(bench, field)


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


@pytest.mark.parametrize("asked", [["run", "demo", "--systems", "m-full"], ["build", "micro-python"]])
def test_a_folder_that_cannot_be_made_is_told_of_before_anything_is_loaded(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "runs")
    told = CliRunner(env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}).invoke(
        build(), ["lab", *asked, "--out", folder]
    )
    said = f"error: --out: {folder} cannot be written (Not a directory); name another folder"
    assert (told.exit_code, told.output.replace("\n", "")) == (1, said)
