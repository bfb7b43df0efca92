"""Executable tasks: every solution passes and nothing else does by chance, and what a model wrote can do no harm."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from unbind_lab.lab import Lab
from unbind_lab.protocols.tasks import PROTOCOL, beside, summary
from unbind_lab.setting import Setting
from unbind_lab.systems import chosen
from unbind_lab.table import markdown
from unbind_lab.tasks.harness import Passed, check, run
from unbind_lab.tasks.sets import LAST_LINE, SETS, answer


@pytest.mark.parametrize("kind", SETS)
def test_a_set_is_large_enough_and_each_task_can_be_told_right_from_wrong(kind: str) -> None:
    tasks = SETS[kind]
    assert len(tasks) >= 120 and len({task.name for task in tasks}) == len({task.prompt for task in tasks}) == len(
        tasks
    )
    some = tasks[::4]  # one or two of each family
    assert all(answer(task.solution + "more") == task.solution for task in tasks)
    assert all(task.base and task.extended for task in tasks)
    assert check(some, [task.solution for task in some]) == [Passed(True, True)] * len(some)
    for wrong in (" None\n", ")\n"):
        passed = check(some, [wrong] * len(some))
        # None is what an exception leads to in the one family that reads numbers
        assert not any(
            one.extended for one, task in zip(passed, some, strict=True) if not task.name.startswith("parse")
        )


def test_extended_tests_find_what_base_tests_do_not() -> None:
    (task,) = [task for task in SETS["line within"] if task.name == "text/0"]
    assert check([task], [" value.decode('latin-1')\n"]) == [Passed(True, False)]


def test_values_and_exceptions_are_told_as_they_are() -> None:
    program = "def f(x):\n    return 1 / x\nprint('noise')\n"
    assert run(program, ["f(2)", "f(0)", "'a' * 3", "nothing"]) == [
        "=0.5",
        "!ZeroDivisionError",
        "='aaa'",
        "!NameError",
    ]
    assert run("def f(:\n", ["1"]) is None
    assert run("raise ValueError\n", ["1"]) is None
    assert run("x = 1\n", ["__import__('os')._exit(0)"]) is None


def test_what_was_written_can_do_no_harm(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        harm = {
            "write": f"open({str(tmp_path / 'made')!r}, 'w')",
            "append": f"open({str(tmp_path / 'made')!r}, 'a')",
            "os.open": f"__import__('os').open({str(tmp_path / 'made')!r}, 65)",
            "read": f"open({str(Path(__file__))!r})",
            "mkdir": f"__import__('os').mkdir({str(tmp_path / 'made')!r})",
            "shell": f"__import__('os').system('touch {tmp_path / 'made'}')",
            "process": f"__import__('subprocess').run(['touch', {str(tmp_path / 'made')!r}])",
            "fork": "__import__('os').fork()",
            "kill": "__import__('os').kill(__import__('os').getppid(), 15)",
            "killpg": "__import__('os').killpg(0, 15)",
            "network": f"__import__('socket').create_connection(('127.0.0.1', {port}))",
            "library": "__import__('ctypes').CDLL(None)",
            "limits": "__import__('resource').setrlimit(0, (99, 99))",
        }
        told = run("import os, socket, subprocess, ctypes, resource\n", list(harm.values()))
    assert told is not None and dict(zip(harm, told, strict=True)) == dict.fromkeys(harm, "!PermissionError")
    assert not (tmp_path / "made").exists()


def test_what_does_not_end_or_takes_too_much_is_stopped() -> None:
    begun = time.monotonic()
    assert run("while True:\n    pass\n", ["1"]) is None  # of processor time
    assert run("import time\ntime.sleep(60)\n", ["1"], seconds=1.0) is None  # of the clock
    assert run("x = bytearray(1 << 33)\n", ["1"]) is None
    assert run("x = 1\n", ["'a' * (1 << 40)"]) == ["!MemoryError"]
    assert time.monotonic() - begun < 30


def test_the_protocol_runs_and_has_a_table(setting: Setting, tmp_path: Path) -> None:
    Lab(setting, tmp_path).run(chosen(["m-full"]), ["main", "tasks"])
    folder = tmp_path / setting.name
    found = [json.loads(line) for line in (folder / "tasks" / "m-full-shipped.jsonl").read_text().splitlines()]
    assert len(found) == sum(map(len, SETS.values())) and not any(one["extended"] and not one["base"] for one in found)
    kept = json.loads((folder / "tasks" / "m-full-shipped.json").read_text())["value"]
    assert {name: kept[name] for name in summary(found)} == summary(found)
    assert "### tasks" in markdown(folder) and LAST_LINE in markdown(folder)


def test_a_setting_in_another_language_has_no_tasks(setting: Setting, tmp_path: Path) -> None:
    rows = [json.loads(line) | {"language": "javascript"} for line in setting.retain.read_text().splitlines()]
    other = tmp_path / "retain.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Lab(replace(setting, retain=other), tmp_path).run(chosen(["m-full"]), ["tasks"])
    assert (tmp_path / setting.name / "tasks" / "m-full-shipped.jsonl").read_text() == ""
    assert summary([]) == {}


def test_what_is_kept_is_held_against_m_full() -> None:
    full = {"last_line_extended": 50.0, "line_within_extended": 20.0}
    assert beside(full, full) == {"kept": pytest.approx(100)}
    assert beside({"last_line_extended": 25.0, "line_within_extended": 40.0}, full)["kept"] == pytest.approx(
        100 * 0.5**0.5
    )
    assert beside({}, {}) == {} and PROTOCOL.name == "tasks"
