"""What is imported for a command."""

from __future__ import annotations

import subprocess
import sys

from tests.support.repository import ROOT


def test_help_texts_do_not_wait_for_what_models_need() -> None:
    program = """
import sys
from server.cli import build
build()
print(sorted({"torch", "transformers", "peft", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr[-2000:]
