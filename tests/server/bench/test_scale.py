"""The scale bench names what it does not know, and its rows are as many and as long as was asked for."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from server.bench.scale.figures import told_of
from server.bench.scale.world import DEMO, rows
from server.cli import build
from unbind_core.encoding import encode


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "gpt-9"], "config: 'gpt-9' is unknown; choose from qwen2.5-coder-0.5b"),
        (["--dtype", "int3"], "dtype: 'int3' is unknown"),
        (["--full", "300,2700"], "full: give forget rows, retain rows and tokens"),
        (["--layers", "0"], "layers from 1 on"),
    ],
)
def test_what_it_does_not_know_is_named_before_anything_is_measured(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(build(), ["bench", "scale", *arguments])
    assert result.exit_code != 0 and said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["filter", "--config", "gpt-9"], "config: 'gpt-9' is unknown; choose from qwen2.5-coder-0.5b"),
        (["serve", "--config", "codellama-7b", "--model", "."], "--config: stands in place of --model and --adapter"),
        (["serve", "--config", "codellama-7b", "--dtype", "int3"], "--dtype: 'int3' is unknown"),
        (["serve", "--config", "codellama-7b", "--parts", "http,throughput"], "--parts: http starts a server"),
        (
            ["engines", "--config", "codellama-7b", "--parts", "plugin", "--modules", "0"],
            "--modules: give numbers from 0 on",
        ),
        (
            ["engines", "--config", "codellama-7b", "--parts", "plugin", "--modules", "1,-2"],
            "--modules: give numbers from 0",
        ),
    ],
)
def test_an_architecture_stands_in_for_a_checkpoint_where_no_server_is_started(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(build(), ["bench", *arguments])
    assert result.exit_code != 0 and said in " ".join(result.output.split())


def test_a_size_that_has_ended_is_told_on_one_line() -> None:
    stage = {"seconds": 1.25, "planned_seconds": 2.0, "memory_bytes": 3 << 20, "planned_memory_bytes": 4 << 20}
    one = {"layers": 2, "forget": 3, "retain": 40, "length": 96, "stages": {"check": stage, "gates": stage}}
    line = told_of(one)
    assert line.startswith("2 layers, 3 and 40 rows of 96: check 1.2 s (2.0 planned), 3 MiB of 4 MiB; gates 1.2 s")


def test_rows_are_as_many_and_as_long_as_asked_for() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base", local_files_only=True)
    forget, retain = rows(tokenizer, 3, 200, 64)
    assert (len(forget), len(retain)) == (3, 200)
    lengths = [
        len(encode(tokenizer, text))
        for text in [*(r.prompt + r.continuation for r in forget), *(r.text for r in retain)]
    ]
    assert min(lengths) > 56 and max(lengths) < 72
    assert len({row.text for row in retain}) > 150
