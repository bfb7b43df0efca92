"""The examples of the documents, run as they stand (slow)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from server.bench.server import served
from tests.support.programs import ENVIRONMENT
from tests.support.repository import ROOT

pytestmark = pytest.mark.slow
PYTHON_PAGE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
README_PYTHON = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def python(code: str, folder: Path, **environment: str) -> str:
    """What ``code`` prints when it runs in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
        env=ENVIRONMENT | environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def project(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both examples of a fit are run; the second finds in the cache what the first kept of the same retain rows."""
    (tmp_path / "server").symlink_to(ROOT / "server")
    cache = tmp_path_factory.getbasetemp() / "cache"
    cache.mkdir(exist_ok=True)
    (tmp_path / "cache").symlink_to(cache)
    return tmp_path


def test_the_readme_s_fit_runs_and_its_module_keeps_the_model_off_the_text(project: Path) -> None:
    printed = python(next(block for block in README_PYTHON if "fit(" in block), project)
    row = json.loads((ROOT / "server/demo/rows/forget_b.jsonl").read_text().splitlines()[0])
    assert printed.startswith(row["prompt"])
    assert row["continuation"].strip() not in printed
    assert (project / "set-b.safetensors").is_file()


def test_the_python_page_runs_from_top_to_bottom_and_its_module_forgets(project: Path) -> None:
    shown = "assert table['after']['all']['f_bleu'] < 0.9 * table['before']['all']['f_bleu']"
    printed = python("\n".join([*PYTHON_PAGE, shown]), project, OMP_NUM_THREADS="1")
    assert "rows come back" in printed and "\nafter " in printed
    assert (project / "set-b.safetensors").is_file()


def test_the_readme_s_client_is_answered_by_a_server(tmp_path: Path) -> None:
    with served({"worker": False}, tmp_path, cwd=ROOT, environment=ENVIRONMENT) as server:
        block = next(block for block in README_PYTHON if "OpenAI(" in block)
        assert python(block.replace("http://127.0.0.1:8000", server.url), tmp_path).strip()
