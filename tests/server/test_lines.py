"""What the commands print: where long work is, in a log that is no terminal, and errors and names as they are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from server.cli import build
from server.cli.console import LINE_SECONDS, Lines, clear_errors, progress_bars, screen
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, counted


def test_a_log_says_now_and_then_which_stages_are_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = Lines(lambda: now)
    for _ in counted(range(3), 3, "takedowns [of all]", lines):
        for _ in counted(range(4), 4, "rows", lines):
            now += LINE_SECONDS / 5
    assert capsys.readouterr().err.splitlines() == [
        "takedowns [of all] 1/3; rows 1/4",
        "takedowns [of all] 2/3; rows 2/4",
    ]
    lines(Progress("short", 0, 2, "beside"))
    assert not capsys.readouterr().err
    now += LINE_SECONDS
    lines(Progress("short", 1, 2, "beside"))
    assert capsys.readouterr().err == "short 1/2 beside\n"


@pytest.mark.parametrize("quiet", [True, False])
def test_short_work_says_nothing(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars(quiet) as progress:
        for _ in counted(range(50), 50, "rows", progress):
            pass
    assert capsys.readouterr() == ("", "")


def test_what_is_in_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for told in ("pip install 'unbind-server[vllm]'", "[/a].safetensors: it is gone", ":key: of rows[0]"):
        with pytest.raises(typer.Exit), clear_errors():
            raise UnbindError(told)
        assert capsys.readouterr().err == f"error: {told}\n"
        table = Table(told, title=told, width=60)
        table.add_row(told)
        screen.print(told, Text(told, style="bold"), soft_wrap=True)
        screen.print(table)
        assert capsys.readouterr().out.count(told) == 5


def test_what_somebody_else_wrote_reaches_no_terminal_as_an_instruction(capsys: pytest.CaptureFixture[str]) -> None:
    told = "\x1b[31m \x1b]52;c;aGk=\x07 \x9b2J \u202egnp.exe\u2066"
    seen = r"\x1b[31m \x1b]52;c;aGk= \x9b2J \u202egnp.exe\u2066"
    with pytest.raises(typer.Exit), clear_errors():
        raise UnbindError(told)
    assert capsys.readouterr().err == f"error: {seen}\n"
    table = Table(told, title=told, width=70)
    table.add_row(told)
    screen.print(told, soft_wrap=True)
    screen.print(table)
    assert capsys.readouterr().out.count(seen) == 4
    screen.print("two\nlines\tand é 名 🔒", soft_wrap=True, highlight=False)
    assert capsys.readouterr().out.split() == ["two", "lines", "and", "é", "名", "🔒"]


def test_a_module_file_says_nothing_to_the_terminal(make_module: Callable[..., UnbindModule], tmp_path: Path) -> None:
    path = tmp_path / "from-elsewhere.safetensors"
    replace(make_module("one"), created_at="\x1b]52;c;aGk=\x07", versions={"\x1b[2J": "\x1b[31m"}).save(path)
    shown = CliRunner().invoke(build(), ["show", str(path)]).stdout
    assert "\x1b" not in shown and r"\x1b]52;c;aGk=" in shown and r"\x1b[2J" in shown


def test_what_is_copied_of_a_module_is_shown_whole(make_module: Callable[..., UnbindModule], tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    replace(make_module("one"), forget_digest="f" * 64).save(path)
    shown = CliRunner(env={"COLUMNS": "40"}).invoke(build(), ["show", str(path)]).stdout
    assert "forget_digest      " + "f" * 64 in shown.splitlines()


@pytest.mark.parametrize("command", [["show", "[/a].safetensors"], ["takedown", "status", "--url", "[/red]http://x"]])
def test_a_command_that_fails_names_what_it_was_given(command: list[str]) -> None:
    found = CliRunner().invoke(build(), command)
    assert found.exit_code == 1 and command[-1] in found.stderr and isinstance(found.exception, SystemExit)
