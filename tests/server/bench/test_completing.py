"""The benchmark of completions sets two ways side by side that write the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from server.bench.completing import LIBRARY, OURS, library, ours, run
from server.bench.serve import Workload
from server.cli import build
from unbind_core.architecture import load_model
from unbind_core.progress import silent


def test_greedily_both_write_the_same(checkpoint: Path) -> None:
    loaded = load_model(checkpoint)
    prompts = [[5 + (7 * row + at) % 200 for at in range(9)] for row in range(6)]
    whole = library(loaded, 12, 0.0)(prompts)
    assert isinstance(whole, torch.Tensor)
    assert ours(loaded, 12, 0.0)(prompts) == whole[:, 9:].tolist()


def test_either_way_has_its_seconds_and_memory(checkpoint: Path) -> None:
    figures = run(load_model(checkpoint), Workload.parse("3x5->4"), temperature=0.8, repeats=1, progress=silent)
    for name in ("greedy", "sampled"):
        found = figures[name]
        assert all(found[way]["seconds"] > 0 and found[way]["memory_bytes"] >= 0 for way in (OURS, LIBRARY))
        assert found["gain"]["median"] > 0
    json.dumps(figures)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "0"], "--temperature: 0.0 is not above 0"),
        (["--workload", "3x5"], "REQUESTSxPROMPT->NEW"),
        (["--config", "gpt-9"], "config: 'gpt-9' is unknown"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(build(), ["bench", "complete", *arguments])
    assert result.exit_code != 0 and said in " ".join(result.output.split())
