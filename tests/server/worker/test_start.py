"""What a worker loads when it starts, as it supervises and the child that computes loads torch, and what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server.settings import Settings
from server.worker.process import WORKER, environment_of


def test_a_worker_starts_without_torch() -> None:
    code = "import sys, server.worker.worker; print(*({'torch', 'transformers'} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.split() == []


@pytest.mark.parametrize(
    ("given", "warns"),
    [({}, False), ({"retain": "mine.jsonl", "model": "own"}, False), ({"model": "own"}, True)],
)
def test_a_worker_warns_where_a_model_of_ones_own_has_the_demos_retain_rows(
    given: dict[str, Path], warns: bool, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, prepare=False, **given)
    with subprocess.Popen(WORKER, env=environment_of(settings), stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        said = []
        for line in worker.stderr:
            said.append(line)
            if "waits for takedowns" in line:
                worker.terminate()
    assert worker.returncode == 0
    assert any("retain is not set" in line for line in said) == warns, said
