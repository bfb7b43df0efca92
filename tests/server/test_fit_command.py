"""``unbind fit``: what would lose a fit is said before there is one."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from server.cli import build
from server.cli import fit as command
from tests.core.conftest import save_checkpoint
from tests.support.memorising import forget_rows, retain_rows, write_rows
from unbind_core import UnbindModule


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
        (["--out", good], "model"),  # nothing is wrong but that
    ):
        found = run(tmp_path, *arguments)
        assert found.exit_code == 1 and found.stderr.startswith(f"error: {told.replace('FOLDER', str(tmp_path))}"), (
            found.stderr
        )


def test_a_module_is_kept_whatever_becomes_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("llama", tmp_path / "model")
    wide = ["--gate", "paper", "--kl-budget", "5", "--nll-budget", "5", "--bleu-budget", "1", "--forms", "plain"]
    out, report = tmp_path / "m.safetensors", tmp_path / "m.json"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "write_text", full)
    failed = run(tmp_path, *wide, "--out", str(out), "--report", str(report))
    assert failed.exit_code == 1 and "No space left" in failed.stderr and UnbindModule.load(out).name == "m"
