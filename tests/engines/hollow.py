"""The engine's own side of vLLM, with nothing behind it that computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from server import demo
from server.engine.vllm.arguments import Arguments
from server.engine.vllm.engine import VllmEngine
from server.engine.vllm.gates import GateReports
from unbind_core.identity import ModelIdentity


class Computing:
    """Gives a token every hundredth of a second."""

    preemptions = steps = 0
    kv_usage = None

    def __init__(self, reports: GateReports) -> None:
        self.reports, self.asked = reports, 0

    async def generate(self, prompt: Any, parameters: Any, name: str) -> AsyncGenerator[Any, None]:
        self.asked += 1
        while True:
            await asyncio.sleep(0.01)
            part = SimpleNamespace(token_ids=[50], logprobs=None)
            yield SimpleNamespace(outputs=[part], num_cached_tokens=0, metrics=None, prompt_logprobs=None)


@pytest.fixture
def hollow() -> Iterator[VllmEngine]:
    tokenizer, identity = AutoTokenizer.from_pretrained(demo.BASE), ModelIdentity("f" * 64, "", 6, 8, 8192)
    made = VllmEngine(Arguments("", "float32", 512, 2, 64, "cpu"), tokenizer, identity, {}, 8192, 4)
    made._thread.start()

    async def up() -> None:
        made._model, made._up = Computing(GateReports()), True  # type: ignore[assignment]

    made._await(up())
    yield made

    async def down() -> None:
        await made._model.reports.close()  # type: ignore[union-attr]
        made._model = None

    made._await(down())
    made.close()
