"""Forget sets that the command line posts in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from server.cli import build
from server.cli.takedown.shown import show_job
from tests.support.live import ADMIN_KEY, Live, live

ROWS = [{"prompt": f"def f{i}():\n", "continuation": f"    return {i} + {i} * left_{i}\n"} for i in range(5)]


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server without a worker."""
    with live(checkpoint, tmp_path_factory.mktemp("submit")) as server:
        yield server


def file_of(folder: Path, rows: list[dict[str, str]], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def submit(running: Live, file: Path, *arguments: str, code: int = 0) -> Any:
    given = ["takedown", "submit", str(file), "--protect", "module", "--scope", "global", *arguments]
    done = CliRunner(env={"NO_COLOR": "1"}).invoke(build(), [*given, "--url", running.url, "--key", ADMIN_KEY])
    assert done.exit_code == code, done.output
    return done


def posted(running: Live) -> dict[str, int]:
    return {one["name"]: one["row_count"] for one in running.admin("/takedowns?limit=1000").body["data"]}


def test_rows_are_posted_in_parts_of_one_size_and_a_repeated_call_posts_nothing_anew(
    running: Live, tmp_path: Path
) -> None:
    file = file_of(tmp_path, ROWS)
    asked = ("--name", "set", "--split", "2", "--idempotency-key", "k", "--json")
    first = json.loads(submit(running, file, *asked).stdout)
    assert [(one["module"], one["rows"]) for one in first] == [("set-1", 1), ("set-2", 2), ("set-3", 2)]
    assert posted(running) == {"set-1": 1, "set-2": 2, "set-3": 2}
    again = json.loads(submit(running, file, *asked).stdout)
    assert [one["job_id"] for one in again] == [one["job_id"] for one in first]
    assert not any(one["created"] for one in again)


def test_what_is_small_enough_keeps_its_name(running: Live, tmp_path: Path) -> None:
    (only,) = json.loads(
        submit(running, file_of(tmp_path, ROWS[:2]), "--name", "small", "--split", "2", "--json").stdout
    )
    assert only["module"] == "small" and posted(running)["small"] == 2


def test_a_part_that_is_refused_says_which_were_posted(running: Live, tmp_path: Path) -> None:
    submit(running, file_of(tmp_path, ROWS[:1], "other.jsonl"), "--name", "half-2")
    asked = (file_of(tmp_path, ROWS), "--name", "half", "--split", "3", "--json")
    stopped = submit(running, *asked, code=1)
    (kept,) = json.loads(stopped.stdout)
    said = " ".join(stopped.stderr.split())
    assert "half-2: " in said and "choose another name" in said
    assert f"posted before it, and kept: half-1 ({kept['takedown_id']})" in said
    busy = next(job for job in running.admin("/jobs").body["data"] if job["module"] == "half-2")
    assert running.admin(f"/jobs/{busy['id']}/cancel", method="POST").status == 200
    again = json.loads(submit(running, *asked, "--idempotency-key", said.split()[-1]).stdout)
    assert [(one["module"], one["created"]) for one in again] == [("half-1", False), ("half-2", True)]
    assert again[0]["takedown_id"] == kept["takedown_id"]


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_row_that_is_refused_in_any_part_leaves_nothing_posted(
    running: Live, tmp_path: Path, options: tuple[str, ...]
) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [*map(json.dumps, ROWS[:3]), "", json.dumps(ROWS[3]), '{"prompt": 3}']
    file.write_text("\n".join(lines))
    told = submit(running, file, "--name", "bad", "--split", "2", *options, code=1)
    said = " ".join(told.stderr.split())
    assert "bad-3: file line 6: field 'prompt' must be a string" in said and said.endswith("nothing was posted")
    assert not any(name.startswith("bad") for name in posted(running))


def test_the_takedown_is_told_before_its_job_is_followed(running: Live, tmp_path: Path) -> None:
    asked = ("--name", "followed", "--protect", "guard", "--guard-run", "8", "--watch")
    told = submit(running, file_of(tmp_path, ROWS), *asked).stdout
    fields = dict(line.split(maxsplit=1) for line in told.splitlines())
    assert running.admin(f"/takedowns/{fields['takedown_id']}").body["name"] == "followed"
    assert fields["guard"].startswith("version 1: enforced (global); steer at runs of 8 lexemes")
    assert fields["binds"] == "every request to this service" and told.index("takedown_id") < told.index("outcome")


def status(running: Live, *job: str) -> list[str]:
    given = ["takedown", "status", *job, "--url", running.url, "--key", ADMIN_KEY]
    done = CliRunner(env={"NO_COLOR": "1"}).invoke(build(), given)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_ids_and_outcomes_of_jobs_are_whole_however_narrow_the_screen(running: Live, tmp_path: Path) -> None:
    name, guard = "n" * 64, ("--protect", "guard", "--guard-run", "8", "--json")
    made = json.loads(submit(running, file_of(tmp_path, ROWS), "--name", name, *guard).stdout)
    head, *lines = status(running)
    assert head.split() == ["job", "module", "state", "stage", "progress", "left", "outcome"]
    (line,) = [line for line in lines if line.startswith(made["job_id"])]
    assert line.split() == [made["job_id"], name, "succeeded", "100", "%", "guarded"]
    fields = dict(line.split(maxsplit=1) for line in status(running, made["job_id"]))
    assert (fields["job"], fields["takedown"]) == (made["job_id"], made["takedown_id"])
    assert (fields["module"], fields["outcome"]) == (name, "guarded")


def test_what_has_not_ended_is_listed_however_much_came_after(running: Live) -> None:
    old = {"name": "oldest", "rows": ROWS, "options": {"protect": "module"}}
    waits = running.admin("/takedowns", old).body["job_id"]
    for number in range(21):
        guard = {"protect": "guard", "guard": {"run": 8}}
        assert running.admin("/takedowns", {"name": f"later-{number}", "rows": ROWS, "options": guard}).status == 202
    lines = status(running)
    assert any(line.startswith(waits) and "queued" in line for line in lines)
    assert not any(" later-0 " in line for line in lines) and any(" later-20 " in line for line in lines)


def test_a_folder_is_refused_in_words(running: Live, tmp_path: Path) -> None:
    told = submit(running, tmp_path, "--name", "folder", code=2).output
    told = " ".join(told.replace("│", " ").split())
    assert "'file'" in told and "is a directory" in told and "Errno" not in told


def test_an_archive_is_not_split(running: Live, tmp_path: Path) -> None:
    told = submit(running, file_of(tmp_path, ROWS, "rows.zip"), "--name", "z", "--split", "3", code=1).output
    assert "--split: 'rows.zip' is an archive" in told and "z" not in posted(running)


def test_many_rows_in_one_module_without_a_guard_are_warned_of(running: Live) -> None:
    rows = [{"prompt": f"def g{i}():\n", "continuation": f"    return {i} - right_{i}\n"} for i in range(61)]
    guarded = {"protect": "both", "guard": {"run": 8}}
    for some, options, warned in ((rows, {}, 1), (rows[:60], {}, 0), (rows, {"gate": "paper"}, 0), (rows, guarded, 0)):
        options = {"protect": "module", "scope": "global", "dry_run": True, **options}
        answer = running.admin("/takedowns", {"name": "many", "rows": some, "options": options}).body
        told = [said for said in answer["warnings"] if said.startswith("rows: one module of 61 rows")]
        assert len(told) == warned and all("--split 40" in said for said in told)


def test_a_name_and_a_scope_that_are_none_are_refused_in_words(running: Live, tmp_path: Path) -> None:
    file = file_of(tmp_path, ROWS)
    told = submit(running, file, "--name", "my module", code=1).output
    assert "error: name: must be 1 to 64 letters, digits" in " ".join(told.split())
    told = submit(running, file, "--name", "x", "--scope", "Global", code=1).output
    assert "error: options.scope: must be 'global', 'profile:NAME' or 'key:ID'" in " ".join(told.split())


def test_rows_in_another_encoding_are_told_of_the_one_that_is_read(running: Live, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(ROWS[0]).encode("utf-16"))
    assert "give JSONL in UTF-8" in submit(running, file, "--name", "wide", code=1).output


def test_a_text_that_is_longer_than_the_context_is_told_to_be_cut(running: Live, tmp_path: Path) -> None:
    rows = [{"text": " ".join(f"value_{i}" for i in range(9_000))}]
    told = " ".join(submit(running, file_of(tmp_path, rows), "--name", "long", code=1).output.split())
    assert "of a row of 'text' it is the first quarter" in told and "make shorter rows of the text" in told


def test_times_are_shown_as_days_and_hours(running: Live, tmp_path: Path) -> None:
    answer = json.loads(submit(running, file_of(tmp_path, ROWS), "--name", "dated", "--json").stdout)
    given = ["takedown", "show", answer["takedown_id"], "--url", running.url, "--key", ADMIN_KEY]
    shown = dict(line.split(maxsplit=1) for line in CliRunner().invoke(build(), given).output.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", shown["created_at"]) and shown["purged_at"] == "None"


@pytest.mark.parametrize(
    ("outcome", "made", "says"),
    [
        (
            "active",
            {"in_force": "enforced", "scope": "global", "remark": "short: recovery 0.2 (aim 0.1)"},
            "enforced (global); short: recovery 0.2 (aim 0.1)",
        ),
        (
            "calibrated",
            {"in_force": "none", "scope": "global", "joint_verdict": "modules m and n together: KL 0.04 (budget 0.01)"},
            "calibrated; modules m and n together: KL 0.04 (budget 0.01)",
        ),
        (
            "ineffective",
            {},
            "ineffective; no gate met the budgets, so that there is no module; give fewer rows in one takedown, or, through the "
            "API, wider options.budgets",
        ),
        ("over_joint_budget", {"joint_verdict": "KL 0.04"}, "over_joint_budget; KL 0.04"),
    ],
)
def test_a_job_says_whom_its_module_binds_or_why_it_binds_nobody(
    outcome: str, made: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {
        "id": "job_1",
        "takedown_id": "td_1",
        "module": "m",
        "state": "succeeded",
        "stage": "publish",
        "progress": 1.0,
    }
    show_job({**job, "eta_seconds": None, "error": None, "outcome": outcome, "result": made})
    fields = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert fields["outcome"] == says


def test_every_option_says_what_it_is() -> None:
    command: Any = get_command(build())
    options = command.commands["takedown"].commands["submit"].params
    assert len(options) > 20 and [option.name for option in options if not option.help] == []


def test_a_job_that_has_ended_is_said_not_to_have_been_cancelled(running: Live) -> None:
    body = {"name": "held", "rows": ROWS[:1], "options": {"protect": "guard", "guard": {"run": 8}}}
    job = running.admin("/takedowns", body).body["job_id"]
    for more in ([], ["--json"]):
        told = CliRunner().invoke(build(), ["takedown", "cancel", job, "--url", running.url, "--key", ADMIN_KEY, *more])
        assert told.exit_code == 0 and "succeeded" in told.stdout
        assert " ".join(told.stderr.split()) == f"job {job} has succeeded already: nothing was cancelled"
