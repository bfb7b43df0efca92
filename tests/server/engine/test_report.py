"""A report tells of every chosen token what the gates did at the position that chose it, and counts like the metrics."""

from __future__ import annotations

import asyncio

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.request import Delta, GenerationRequest, Sampling
from tests.server.conftest import MakeModule
from unbind_core.architecture import LoadedModel


async def _deltas(engine: EmbeddedEngine, report: bool) -> list[Delta]:
    modules = engine.modules.pin({"one": 1.0, "two": 0.0})
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    request = GenerationRequest(tuple(range(6, 30)), sampling, modules, report=report)
    return [delta async for delta in engine.generate(request)]


def test_a_report_has_an_activation_for_each_token_and_module(loaded: LoadedModel, make_module: MakeModule) -> None:
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=2, max_length=64, chunk_tokens=10)
    engine.start()
    try:
        made = [make_module(name, layer=i, seed=i) for i, name in enumerate(("one", "two"))]
        engine.sync_modules([(module, module.digest) for module in made]).result(10)
        with_report = asyncio.run(_deltas(engine, True))
        counts = engine.gate_counts().result(10)
        without = asyncio.run(_deltas(engine, False))
    finally:
        engine.close()
    tokens = [token for delta in with_report for token in delta.tokens]
    values = [value for delta in with_report for value in delta.activations]
    assert len(values) == len(tokens) == 12
    assert all(set(value) == {"one", "two"} and min(value.values()) >= 0 for value in values)
    for name in ("one", "two"):  # the first token was chosen in the prefill, the others by decode steps
        assert sum(value[name] > 0 for value in values[1:]) == counts[name]["decode"][1]
    assert [token for delta in without for token in delta.tokens] == tokens
    assert not any(delta.activations for delta in without)
