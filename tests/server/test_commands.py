"""What is imported for a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.registry.database import open_database
from tests.support.repository import ROOT


def test_a_path_that_is_no_text_is_shown(tmp_path: Path) -> None:
    open_database(tmp_path / "unbind.sqlite").dispose()
    copy = os.fsencode(tmp_path) + b"/copy\xfc.sqlite"
    words = [sys.executable, "-m", "server", "db", "backup", "--data-dir", str(tmp_path), "--out", copy]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "copy\\udcfc.sqlite" in done.stdout, done.stderr[-2000:]
    assert Path(os.fsdecode(copy)).is_file()


def test_a_working_directory_that_was_removed_is_named() -> None:
    words = f"cd $(mktemp -d) && rmdir $PWD && {sys.executable} -m server show {ROOT}/modules/demo-a.safetensors"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", words], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("error: the working directory was removed"), done.stderr


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
