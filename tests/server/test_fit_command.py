"""``unbind fit`` and ``verify``: what would lose a fit is said before there is one; rows are read as the service reads them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from server.api.admin.intake import from_upload
from server.cli import build, console, models
from server.cli import fit as command
from server.cli.verify import _before_after
from tests.core.conftest import save_checkpoint
from tests.support.memorising import forget_rows, retain_rows, write_rows
from unbind_core import UnbindModule, parse_forget

SHIPPED = Path(__file__).parents[2] / "modules"


def run(folder: Path, *arguments: str) -> Result:
    """A fit of small rows; a model that is not there where none is named."""
    forget = write_rows(folder / "forget.jsonl", forget_rows())
    retain = write_rows(folder / "retain.jsonl", retain_rows(16))
    rows = ["--forget", str(forget), "--retain", str(retain)]
    return CliRunner().invoke(build(), ["fit", "--model", str(folder / "model"), *rows, *arguments])


def test_names_and_files_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    good = str(tmp_path / "m.safetensors")
    for arguments, told in (
        (["--out", str(tmp_path / "my module.safetensors")], "--name: 'my module' must be 1 to 64 letters"),
        (["--out", good, "--name", "a/b"], "--name: 'a/b' must be"),
        (["--out", str(tmp_path / "folder"), "--name", "m"], "--out: FOLDER/folder cannot be written (Is a directory)"),
        (["--out", str(tmp_path / "file" / "m.safetensors")], "--out: FOLDER/file/m.safetensors cannot be written"),
        (["--out", good, "--report", str(tmp_path / "folder")], "--report: FOLDER/folder cannot be written"),
        (["--out", good, "--report", str(tmp_path / "file" / "r")], "--report: FOLDER/file/r cannot be written"),
        (["--out", good, "--gate", "paper", "--reference", good], "--reference: gate 'paper' leads towards nothing"),
        (["--out", good, "--forget", str(tmp_path / "none")], "--forget: FOLDER/none cannot be read"),
        (["--out", good, "--retain", str(tmp_path / "folder")], "--retain: FOLDER/folder cannot be read"),
        (["--out", good, "--retain-calibration", str(tmp_path / "none")], "--retain-calibration: "),
        (["--out", good, "--effort", "0"], "effort: 0.0 is not above 0"),
        (["--out", good, "--gate", "none"], "gate: 'none' is unknown"),
        (["--out", good, "--kl-budget", "-1"], "budgets.kl: -1.0 is met by no module"),
        (["--out", good, "--gate", "paper", "--quantiles", "2"], "quantiles: give at least one value between 0 and 1"),
        (["--out", good, "--forget", os.devnull], "the forget set has no rows"),
        (["--out", good, "--retain", os.devnull], "the retain set has 0 rows; at least 10 are needed"),
        (["--out", good], "model"),  # nothing is wrong but that
    ):
        found = run(tmp_path, *arguments)
        assert found.exit_code == 1 and found.stderr.startswith(f"error: {told.replace('FOLDER', str(tmp_path))}"), (
            found.stderr
        )


def test_a_reference_that_is_none_is_told_of_before_anything_is_measured(tmp_path: Path) -> None:
    words = ["verify", str(tmp_path / "no-module"), "--reference", str(tmp_path / "no-adapter")]
    found = CliRunner().invoke(build(), words)
    assert found.exit_code == 1 and f"error: adapter: '{tmp_path / 'no-adapter'}' is not a directory" in found.stderr


def test_a_seed_that_no_generator_takes_is_refused_before_the_fit(tmp_path: Path) -> None:
    for seed in ("-1", str(2**70)):  # the API's bounds
        refused = run(tmp_path, "--seed", seed, "--out", str(tmp_path / "m.safetensors"))
        assert refused.exit_code == 2 and "--seed" in refused.stderr


def test_a_fit_takes_its_effort_from_the_command(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "model")
    refused = run(tmp_path, "--effort", "0", "--out", str(tmp_path / "m.safetensors"))
    assert refused.exit_code == 1 and "error: effort: 0.0 is not above 0; 1 is the usual one" in refused.stderr


def test_rows_are_read_as_the_service_reads_them(tmp_path: Path) -> None:
    data = ('\ufeff{"prompt": "a = 1\\n", "continuation": "s = \'\u2028\'"}\r\n' + "\n").encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    assert len(found := models.forget_rows(path)) == 1
    assert found == from_upload(data, (), ()).rows == parse_forget(path) and "\u2028" in found[0].continuation


def test_a_folder_in_place_of_rows_is_refused_by_the_option_s_name(tmp_path: Path) -> None:
    for option in ("--forget", "--retain"):
        refused = CliRunner().invoke(
            build(), ["verify", str(SHIPPED / "demo-a.safetensors"), option, str(tmp_path), "--attempts", "1"]
        )
        assert f"error: {option}: {tmp_path} cannot be read (Is a directory); name a JSONL file" in refused.stderr


def test_groups_without_rows_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    measures = {"rows": 3, "f_bleu": 0.5, "mean_recovery": None}
    groups = {"fitted": measures, "calibration": {**measures, "rows": 0, "f_bleu": None}, "retain": {"ppl": 2.0}}
    console.screen.print(_before_after("m", {"before": groups, "after": groups}))
    told = capsys.readouterr().out
    assert "fitted" in told and "retain" in told and "calibration" not in told


def test_a_module_is_kept_whatever_becomes_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("llama", tmp_path / "model")
    wide = ["--gate", "paper", "--kl-budget", "5", "--nll-budget", "5", "--bleu-budget", "1", "--forms", "plain"]
    out, report = tmp_path / "m.safetensors", tmp_path / "m.json"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "write_text", full)
    failed = run(tmp_path, *wide, "--out", str(out), "--report", str(report))
    assert failed.exit_code == 1 and "No space left" in failed.stderr and UnbindModule.load(out).name == "m"


@pytest.mark.parametrize("option", ["--forget", "--retain"])
def test_verify_refuses_files_without_a_row(option: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    found = CliRunner().invoke(build(), ["verify", str(SHIPPED / "demo-a.safetensors"), option, str(empty)])
    assert found.exit_code == 1 and f"{option}: {empty} holds no row" in " ".join(found.stderr.split())
    assert not found.stdout
