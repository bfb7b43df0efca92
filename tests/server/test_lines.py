"""Where long work is, in a log that is no terminal."""

from __future__ import annotations

import pytest

from server.cli.console import LINE_SECONDS, Lines, progress_bars
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
