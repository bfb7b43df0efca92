"""What fails in the engine fails those whose it is, and the engine serves on, or says that it does not."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.refusals import EngineStopped
from server.engine.request import Delta, GenerationRequest, Sampling
from unbind_core.errors import UnbindError, UnsupportedArchitecture

ASKED = GenerationRequest((9, 10, 11), Sampling(max_tokens=8, ignore_eos=True))


class Panic(BaseException):
    """As PyO3 raises one: no Exception."""


def _ask(engine: EmbeddedEngine, request: GenerationRequest = ASKED) -> Delta:
    async def last() -> Delta:
        return [delta async for delta in engine.generate(request)][-1]

    return asyncio.run(asyncio.wait_for(last(), 20))


def _broken(*_: Any, **__: Any) -> Any:
    raise Panic("out of bounds")


def test_who_no_longer_waits_for_an_errand_ends_nothing(engine: EmbeddedEngine) -> None:
    begun, over, done = threading.Event(), threading.Event(), []

    def hold() -> None:
        begun.set()
        over.wait(20)

    held = engine.call(hold)
    assert begun.wait(20)
    left, other = engine.call(lambda: done.append("left")), engine.call(lambda: done.append("other"))
    assert left.cancel()
    over.set()
    held.result(20), other.result(20)
    assert done == ["other"] and _ask(engine).finish_reason == "length" and engine.healthy


def test_a_panic_ends_its_requests_and_errands_alone(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"Panic.*out of bounds"):
        engine.call(_broken).result(20)
    for owner, name in ((engine.runner, "forward"), (engine.scheduler, "schedule")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, _broken)
            last = _ask(engine)
        assert last.finish_reason == "error" and last.error
        assert _ask(engine).finish_reason == "length" and engine.healthy


def test_an_engine_whose_thread_has_ended_says_so(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    post, calls = engine._post, []

    def once(soon: bool = False) -> None:
        calls.append(soon)
        if len(calls) == 2:
            _broken()
        post(soon)

    monkeypatch.setattr(engine, "_post", once)
    assert engine.healthy
    last = _ask(engine)
    assert last.finish_reason == "error" and last.error == "the engine ended; the request was dropped"
    engine._thread.join(20)
    assert not engine.healthy
    with pytest.raises(EngineStopped):
        _ask(engine)
    with pytest.raises(EngineStopped):
        engine.gates()


class Guard:
    """Lets everything pass, and fails at the end."""

    blocked, barred = None, ()

    def lets(self, *_: Any) -> bool:
        return True

    def passed(self, delta: Delta) -> Delta:
        return delta

    def last(self, delta: Delta) -> Delta:
        raise Panic(f"cannot end {delta.finish_reason}")


@pytest.mark.parametrize("part", ["text", "guard"])
def test_what_fails_for_one_answer_ends_no_other(engine: EmbeddedEngine, part: str) -> None:
    async def run() -> list[list[Delta]]:
        sent = [engine.submit(ASKED) for _ in range(3)]
        if part == "text":
            sent[1][0].text.push = _broken  # type: ignore[method-assign]
        else:
            sent[1][0].guarding = Guard()  # type: ignore[assignment]
        return await asyncio.gather(*(_all(deltas) for _, deltas in sent))

    async def _all(queue: asyncio.Queue[Delta]) -> list[Delta]:
        deltas = [await asyncio.wait_for(queue.get(), 20)]
        while deltas[-1].finish_reason is None:
            deltas.append(await asyncio.wait_for(queue.get(), 20))
        return deltas

    answers = asyncio.run(run())
    assert [deltas[-1].finish_reason for deltas in answers] == ["length", "error", "length"]
    assert answers[1][-1].error == "the answer could not go on (Panic); the request was dropped"
    assert [sum(len(delta.tokens) for delta in answers[i]) for i in (0, 2)] == [8, 8]
    assert engine.stats().running == 0 and _ask(engine).finish_reason == "length"


def test_a_model_that_cannot_run_on_slots_is_refused_with_the_remedy(tokenizer: PreTrainedTokenizerBase) -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=400, hidden_size=32, n_layer=2, n_head=2)).eval()  # ALiBi
    engine = EmbeddedEngine(model, tokenizer, max_slots=1, max_length=64)
    with pytest.raises(UnsupportedArchitecture, match=r"BloomForCausalLM .*ALiBi.*serve a model with rotary"):
        engine.start()
    engine.close()


def test_a_model_whose_logits_are_no_numbers_is_refused_as_damaged(tokenizer: PreTrainedTokenizerBase) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes)).eval()
    model.model.norm.weight.data[0] = float("nan")
    engine = EmbeddedEngine(model, tokenizer, max_slots=1, max_length=64)
    with pytest.raises(UnbindError, match=r"no finite numbers in float32.*damaged.*--dtype"):
        engine.start()
    engine.close()
