"""What is imported for a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from server.registry.database import open_database
from tests.support.repository import ROOT


def run(*words: str | bytes, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What a command of its own process does."""
    given = [sys.executable, "-m", "server", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(given, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_a_path_that_is_no_text_is_shown(tmp_path: Path) -> None:
    open_database(tmp_path / "unbind.sqlite").dispose()
    copy = os.fsencode(tmp_path) + b"/copy\xfc.sqlite"
    done = run("db", "backup", "--data-dir", str(tmp_path), "--out", copy)
    assert done.returncode == 0 and "copy\\udcfc.sqlite" in done.stdout, done.stderr[-2000:]
    assert Path(os.fsdecode(copy)).is_file()


def test_help_texts_do_not_wait_for_what_models_need() -> None:
    program = """
import sys
from server.cli import build
build()
print(sorted({"torch", "transformers", "peft", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr[-2000:]
