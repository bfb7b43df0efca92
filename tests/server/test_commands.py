"""What is imported for a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from server.cli import build
from server.registry.database import open_database
from tests.support.repository import ROOT


def test_a_path_that_is_no_text_is_shown(tmp_path: Path) -> None:
    open_database(tmp_path / "unbind.sqlite").dispose()
    copy = os.fsencode(tmp_path) + b"/copy\xfc.sqlite"
    words = [sys.executable, "-m", "server", "db", "backup", "--data-dir", str(tmp_path), "--out", copy]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "copy\\udcfc.sqlite" in done.stdout, done.stderr[-2000:]
    assert Path(os.fsdecode(copy)).is_file()


@pytest.mark.parametrize("words", [["--limit", "-1"], ["--limit", "9" * 30], ["--after", "-1"], ["--after", "9" * 30]])
def test_pages_of_the_audit_trail_that_no_database_has_are_refused(tmp_path: Path, words: list[str]) -> None:
    open_database(tmp_path / "unbind.sqlite").dispose()
    found = CliRunner().invoke(build(), ["audit", "list", "--data-dir", str(tmp_path), *words])
    assert found.exit_code == 2 and words[0] in found.stderr, found.output


def test_a_page_of_the_audit_trail_says_that_there_is_more_and_where(tmp_path: Path) -> None:
    open_database(tmp_path / "unbind.sqlite").dispose()

    def run(*words: str) -> Result:
        return CliRunner().invoke(build(), [*words, "--data-dir", str(tmp_path)])

    assert [run("key", "create", name).exit_code for name in ("one", "two", "three")] == [0, 0, 0]
    first = run("audit", "list", "--limit", "2")
    assert first.stderr.strip() == "there are more: --after 2 shows what follows"
    assert first.stdout.count("key.create") == 2
    rest = run("audit", "list", "--limit", "2", "--after", "2")
    assert rest.stderr == "" and rest.stdout.count("key.create") == 1


@pytest.mark.parametrize(
    ("command", "option"),
    [("takedown", "--rows"), ("takedown", "--first-rows"), ("takedown", "--worker-threads"), ("gate", "--attempts")],
)
def test_a_benchmark_of_nothing_is_refused_before_it_begins(command: str, option: str) -> None:
    found = CliRunner().invoke(build(), ["bench", command, option, "0"])
    assert found.exit_code == 2 and option in found.stderr, found.output


def test_a_working_directory_that_was_removed_is_named() -> None:
    words = f"cd $(mktemp -d) && rmdir $PWD && {sys.executable} -m server show {ROOT}/modules/demo-a.safetensors"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", words], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("error: the working directory was removed"), done.stderr


@pytest.mark.parametrize("words", [["--help"], ["show", "modules/demo-a.safetensors", "--json"], ["db", "backup"]])
def test_a_full_disk_behind_standard_output_is_told_of(tmp_path: Path, words: list[str]) -> None:
    open_database(tmp_path / "unbind.sqlite").dispose()
    environment = {**os.environ, "UNBIND_DATA_DIR": str(tmp_path)}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "server", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 1 and done.stderr.startswith("error: standard output cannot be written"), done.stderr[
        -2000:
    ]
    assert "\n" not in done.stderr.rstrip()


@pytest.mark.parametrize(
    ("while_importing", "begin", "code"),
    [
        ("server.cli.module", "from server.cli import main; main()", 130),
        ("server.worker.worker", "import runpy; runpy.run_module('server.worker', run_name='__main__')", 0),
    ],
)
def test_ctrl_c_while_a_command_is_imported_is_no_traceback(
    tmp_path: Path, while_importing: str, begin: str, code: int
) -> None:
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in its background ignores it
class Pressed:
    def find_spec(self, name, *_):
        if name == "{while_importing}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressed())
sys.argv = ["unbind"]
{begin}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UNBIND_DATA_DIR": str(tmp_path)}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr[-2000:]


def test_help_texts_do_not_wait_for_what_models_need() -> None:
    program = """
import sys
from server.cli import build
build()
print(sorted({"torch", "transformers", "peft", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr[-2000:]


KEPT = """
import ctypes, sys
import torch
from server.cli import main
from unbind_core.cpu.linears import packed_linears

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used free keepcost".split()]

sys.argv = ["unbind", "--help"]
try:
    main()
except SystemExit:
    pass
heap = ctypes.CDLL("libc.so.6").mallinfo2
heap.restype = Heap
model, used = torch.nn.Sequential(torch.nn.Linear(256, 768)), []
with torch.inference_mode(), packed_linears(model):
    for rows in range(1, 1001):
        model(torch.zeros(rows, 256))
        if rows in (1, 400, 1000):
            used.append(heap().used)
print(*used)
"""


def test_prompts_of_ever_new_lengths_do_not_take_more_and_more_memory() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    done = subprocess.run([sys.executable, "-c", KEPT], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    begun, then, at_last = map(int, done.stdout.split()[-3:])
    assert at_last - then < (then - begun) / 4  # nothing more for 600 new numbers of rows behind the first 400
