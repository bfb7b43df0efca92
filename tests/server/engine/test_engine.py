"""The engine's promise: a request in any batch gives what it gives alone, and what plain ``generate`` gives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.embedded.scheduler import Plan
from server.engine.refusals import EngineStopped, PromptTooLong, QueueFull
from server.engine.request import Delta, GenerationRequest, Sampling
from tests.core.conftest import FAMILIES, save_checkpoint
from tests.server.conftest import MakeModule
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.errors import UnknownModule


async def _collect(engine: EmbeddedEngine, request: GenerationRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(request)]


def _tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def _prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(6, 300) for _ in range(rng.randrange(3, 70))) for _ in range(count)]


def _plain(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    end = model.generation_config.eos_token_id
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def test_many_requests_with_different_modules_equal_plain_generate_one_by_one(
    engine: EmbeddedEngine, loaded: LoadedModel, make_module: MakeModule
) -> None:
    sets: list[tuple[str, ...]] = [(), ("one",), ("two",), ("one", "two")]
    bank = ModuleBank()
    bank.add(make_module("one"))
    bank.add(make_module("two", layer=2, seed=1))
    prompts = _prompts(16)
    greedy = Sampling(max_tokens=20)

    async def all_at_once() -> list[list[int]]:
        requests = [GenerationRequest(p, greedy, engine.modules.pin(sets[i % 4])) for i, p in enumerate(prompts[:12])]
        return [_tokens(deltas) for deltas in await asyncio.gather(*(_collect(engine, r) for r in requests))]

    outputs = asyncio.run(all_at_once())
    changed = 0
    for i, output in enumerate(outputs):
        plain = _plain(loaded.model, prompts[i], 20)
        with attach(loaded.model, bank, list(sets[i % 4])):
            expected = _plain(loaded.model, prompts[i], 20)
        assert output == expected, f"request {i} with modules {sets[i % 4]}"
        changed += expected != plain
    assert changed >= 6  # the modules of this test do something


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # raised on importing one family
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_what_plain_generate_gives(family: str, tmp_path: Path) -> None:
    loaded = load_model(save_checkpoint(family, tmp_path / family))
    prompts = _prompts(5, seed=3)
    expected = [_plain(loaded.model, prompt, 12) for prompt in prompts]
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=3, max_length=128, queue_limit=8, chunk_tokens=16)
    engine.start()
    try:

        async def run() -> list[list[Delta]]:
            return await asyncio.gather(
                *(_collect(engine, GenerationRequest(p, Sampling(max_tokens=12))) for p in prompts)
            )

        assert [_tokens(deltas) for deltas in asyncio.run(run())] == expected
    finally:
        engine.close()


def test_a_seed_gives_the_same_answer_alone_and_in_company(engine: EmbeddedEngine) -> None:
    prompts = _prompts(6, seed=5)
    seeded = GenerationRequest(prompts[0], Sampling(max_tokens=24, temperature=0.9, top_p=0.9, seed=11))

    async def alone() -> list[int]:
        return _tokens(await _collect(engine, seeded))

    async def crowded() -> list[int]:
        others = [GenerationRequest(p, Sampling(max_tokens=30, temperature=1.0)) for p in prompts[1:]]
        results = await asyncio.gather(*(_collect(engine, r) for r in [*others, seeded]))
        return _tokens(results[-1])

    first, second = asyncio.run(alone()), asyncio.run(crowded())
    assert first == second
    unseeded = GenerationRequest(prompts[0], Sampling(max_tokens=24, temperature=1.5))
    assert _tokens(asyncio.run(_collect(engine, unseeded))) != _tokens(asyncio.run(_collect(engine, unseeded)))


def test_a_stop_string_ends_the_answer_before_it(engine: EmbeddedEngine) -> None:
    prompt = _prompts(1, seed=7)[0]
    full = "".join(d.text for d in asyncio.run(_collect(engine, GenerationRequest(prompt, Sampling(max_tokens=40)))))
    assert len(full) > 12
    stop = full[8:11]
    deltas = asyncio.run(
        _collect(engine, GenerationRequest(prompt, Sampling(max_tokens=40, stop=(stop, "never this"))))
    )
    assert "".join(d.text for d in deltas) == full[: full.index(stop)]
    assert deltas[-1].finish_reason == "stop"


def test_the_queue_has_room_by_who_asks(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, check = [], engine.scheduler.check_room

    def spied(arriving: Any, owner: str) -> None:
        seen.append(owner)
        check(arriving, owner)

    monkeypatch.setattr(engine.scheduler, "check_room", spied)

    async def ask_once() -> None:
        async for _ in engine.generate(GenerationRequest((1, 2, 3), Sampling(max_tokens=1), owner="somebody")):
            pass

    asyncio.run(ask_once())
    assert seen == ["somebody"]


def test_leaving_a_stream_frees_its_slot(engine: EmbeddedEngine) -> None:
    async def run() -> None:
        stream = engine.generate(GenerationRequest(_prompts(1)[0], Sampling(max_tokens=150, ignore_eos=True)))
        await anext(stream)
        assert engine.stats().running == 1
        await stream.aclose()  # type: ignore[attr-defined]
        for _ in range(200):
            if engine.stats().running == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the slot is still taken")

    asyncio.run(run())


def test_a_full_queue_refuses_and_recovers(engine: EmbeddedEngine) -> None:
    prompt = _prompts(1)[0]

    async def run() -> int:
        async def one() -> bool:
            try:
                await _collect(engine, GenerationRequest(prompt, Sampling(max_tokens=30, ignore_eos=True)))
            except QueueFull:
                return False
            return True

        accepted = await asyncio.gather(*(one() for _ in range(40)))
        assert await one()
        return sum(accepted)

    assert 12 <= asyncio.run(run()) < 40  # 4 slots and 8 places


def test_a_prompt_that_does_not_fit_is_told_by_how_much(engine: EmbeddedEngine) -> None:
    with pytest.raises(PromptTooLong, match="by 44;"):
        asyncio.run(_collect(engine, GenerationRequest((7,) * 200, Sampling(max_tokens=100))))


def test_a_running_request_keeps_its_module_when_the_name_gets_a_new_version(
    engine: EmbeddedEngine, make_module: MakeModule
) -> None:
    prompt = _prompts(1, seed=9)[0]
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    requests = [GenerationRequest(prompt, sampling, engine.modules.pin(["one"]))]
    expected = _tokens(asyncio.run(_collect(engine, requests[0])))
    other = make_module("one", layer=0, seed=99)

    async def swap_midway() -> list[int]:
        tokens: list[int] = []
        swapped = False
        async for delta in engine.generate(requests[0]):
            if len(tokens) >= 5 and not swapped:
                swapped = True
                await asyncio.wrap_future(engine.sync_modules([(other, other.digest)]))
            tokens += delta.tokens
        return tokens

    assert asyncio.run(swap_midway()) == expected
    fresh = GenerationRequest(prompt, Sampling(max_tokens=60, ignore_eos=True), engine.modules.pin(["one"]))
    assert fresh.modules.labels == (f"one@{other.digest[:12]}",)
    assert _tokens(asyncio.run(_collect(engine, fresh))) != expected
    with pytest.raises(UnknownModule, match="loaded: one"):
        engine.modules.pin(["two"])
    requests.clear()
    engine.call(engine.modules.collect).result(10)
    assert len(engine.modules.bank_names()) == 1  # the old version left with its last request


def test_gates_are_counted_by_module_and_phase(engine: EmbeddedEngine) -> None:
    prompt = _prompts(1)[0]
    request = GenerationRequest(prompt, Sampling(max_tokens=10, ignore_eos=True), engine.modules.pin(["one"]))
    asyncio.run(_collect(engine, request))
    counts = engine.gate_counts().result(10)
    assert counts["one"]["prefill"][0] == len(prompt)
    assert counts["one"]["decode"][0] == 9  # the last token needs no step of its own
    assert 0 < counts["one"]["prefill"][1] <= len(prompt)
    assert counts["two"] == {"prefill": (0, 0), "decode": (0, 0)}


def test_a_failing_step_fails_its_requests_and_the_engine_serves_on(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request = GenerationRequest(_prompts(1)[0], Sampling(max_tokens=5))
    forward = engine.runner.forward

    def broken(plan: Plan) -> Any:
        if plan.decode:
            raise MemoryError("no room")
        return forward(plan)

    monkeypatch.setattr(engine.runner, "forward", broken)
    last = asyncio.run(_collect(engine, request))[-1]
    assert last.finish_reason == "error" and last.error is not None and "out of memory" in last.error
    monkeypatch.setattr(engine.runner, "forward", forward)
    assert asyncio.run(_collect(engine, request))[-1].finish_reason == "length"
    assert engine.stats().running == 0


def test_closing_ends_streams_and_takes_the_hooks_off(checkpoint: Path) -> None:
    loaded = load_model(checkpoint)
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=2, max_length=256)
    engine.start()

    async def run() -> str | None:
        stream = engine.generate(GenerationRequest((9,) * 20, Sampling(max_tokens=200, ignore_eos=True)))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        return [delta async for delta in stream][-1].finish_reason

    assert asyncio.run(run()) == "error"
    assert not any(module._forward_hooks for module in loaded.model.modules())
    with pytest.raises(EngineStopped):
        asyncio.run(_collect(engine, GenerationRequest((9, 9))))
