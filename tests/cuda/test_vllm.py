"""vLLM on a GPU, where it is installed: whole decode steps in graphs that are cut at modules."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import pytest

from server import demo
from server.bench.engines.equality import mixed
from server.bench.engines.subject import Subject, answered, running
from tests.cuda.test_engine import loaded_on, prompts, shipped

REQUESTS = 50

if find_spec("vllm"):

    def test_whole_steps_in_graphs_answer_as_the_embedded_engine(capfd: pytest.CaptureFixture[str]) -> None:
        tokenizer = loaded_on("cpu").tokenizer
        asked = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts()]
        subject = Subject(demo.BASE, demo.ADAPTER, lambda: loaded_on("cuda"), shipped(), asked)
        wanted, found = mixed(subject, REQUESTS), {}
        for name in ("embedded", "vllm"):
            with running(subject, name) as engine:
                found[name], _ = asyncio.run(answered(engine, wanted))
        same = sum(one == other for one, other in zip(*found.values(), strict=True))
        assert same == REQUESTS
        assert sum(bool(modules) for _, modules, _ in wanted) > REQUESTS / 2
        told = "".join(capfd.readouterr())
        assert "Capturing CUDA graphs (decode, FULL)" in told, told[-2000:]
