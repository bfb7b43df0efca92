"""What Python's collector of garbage looks through, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.repository import ROOT


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


CYCLE = """
import gc, sys
from server import collector

class Kept:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("taken apart")

kept = Kept()
"""


def test_a_process_ends_without_looking_for_garbage() -> None:
    plain, spared = ended(CYCLE), ended(f"{CYCLE}\ncollector.spare_what_stays()")
    assert (plain.returncode, plain.stdout) == (0, "taken apart\n")
    assert (spared.returncode, spared.stdout, spared.stderr) == (0, "", "")


def test_old_objects_are_looked_through_seldom_until_a_server_has_started() -> None:
    told = ended(
        "import gc; from server.collector import *; before = gc.get_threshold(); spare_what_stays(); seldom = gc.get_threshold();"
        "leave_out_what_stays(); print(seldom[:2] == before[:2], seldom[2] > 99 * before[2], gc.get_threshold() == before,"
        "gc.get_freeze_count() > 1000)"
    )
    assert told.stdout == "True True True True\n", told.stderr


def test_where_libraries_complain_of_what_is_left_it_is_looked_for() -> None:
    code = f"{CYCLE}\nsys.modules['triton'] = sys\ncollector.spare_what_stays()\ncollector.leave_out_what_stays()"
    assert ended(code).stdout == "taken apart\n"


@pytest.mark.parametrize("ends", ["", "raise SystemExit(3)", "raise ValueError('said')"])
def test_a_process_that_leaves_at_once_has_said_everything_and_ended_its_work(ends: str) -> None:
    done = ended(
        f"{CYCLE}\nimport logging, logging.handlers, threading, time\n"
        "logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stdout)))\n"
        "logging.getLogger().warning('logged')\ncollector.leave_at_once()\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('worked'))).start()\n"
        f"print('first', end=' ')\n{ends}"
    )
    assert done.returncode == 0 and done.stdout.split() == ["first", "worked", "logged"]
    assert ("said" in done.stderr) == ("said" in ends)


@pytest.mark.parametrize("gone", ["sys.stdout = None", "sys.stdout.close()"])
def test_a_process_without_standard_output_leaves_at_once_as_well(gone: str) -> None:
    later = "import atexit, sys\nfrom server import collector\natexit.register(sys.stderr.write, 'later')"
    done = ended(f"{later}\n{gone}\ncollector.leave_at_once()")
    assert (done.returncode, done.stderr) == (0, "")
