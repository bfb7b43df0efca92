"""The same tokens when vLLM compiles the model, or spreads it over several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.engine.request import GenerationRequest, Sampling
from tests.engines.both import Engines, shipped, started
from tests.support.asking import ask, sync


@pytest.mark.parametrize("flag", ["tensor-parallel-size=2", "data-parallel-size=2", "no-enforce-eager"])
def test_many_processes_and_compiled_graphs_give_the_same_tokens(engines: Engines, tmp_path: Path, flag: str) -> None:
    sampling = Sampling(max_tokens=16)
    other = started(tmp_path, "kv-cache-memory-bytes=30000000", flag)
    try:
        sync(other, shipped())
        found = []
        for engine in (other, engines.embedded):
            requests = [
                GenerationRequest(prompt, sampling, engine.modules.pin(modules), report=True)
                for prompt in engines.prompts[:10]
                for modules in ([], ["demo-a"], ["demo-a-silent", "demo-a-paper"])
            ]
            found.append([(answer.tokens, len(answer.whole.activations)) for answer in ask(engine, requests)])
        assert found[0] == found[1]
    finally:
        other.close()
