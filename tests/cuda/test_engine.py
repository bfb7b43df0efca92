"""The embedded engine on a GPU answers as it does on a CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch

from server import demo
from server.engine.embedded.engine import EmbeddedEngine
from server.engine.request import GenerationRequest, Sampling
from tests.support.asking import Answer, ask, sync
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.module import UnbindModule

SHIPPED = ("demo-a", "demo-a-silent", "demo-a-paper")
SETS: list[Mapping[str, float]] = [
    {},
    {"demo-a": 1.0},
    {"demo-a-silent": 1.0},
    {"demo-a": 0.5, "demo-a-paper": 1.0},
    dict.fromkeys(SHIPPED, 1.0),
]
ROUNDING = 2e-3  # nats: sums in another order, on states of a few hundred


@dataclass
class Pair:
    """The same model and modules on both devices."""

    cpu: EmbeddedEngine
    cuda: EmbeddedEngine
    prompts: list[tuple[int, ...]]

    def both(self, asked: list[tuple[tuple[int, ...], Mapping[str, float], Sampling]]) -> list[list[Answer]]:
        """The answers of either, with reports."""
        return [
            ask(engine, [GenerationRequest(p, sampling, engine.modules.pin(set_), True) for p, set_, sampling in asked])
            for engine in (self.cpu, self.cuda)
        ]


def loaded_on(device: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The demo model with its adapter."""
    return load_model(demo.BASE, demo.ADAPTER, dtype=dtype, device=device)


def shipped() -> list[UnbindModule]:
    return [UnbindModule.load(demo.MODULES / f"{name}.safetensors") for name in SHIPPED]


def prompts(name: str = "forget_a.jsonl") -> list[str]:
    return [str(json.loads(line)["prompt"]) for line in (demo.ROWS / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    engines = []
    for device in ("cpu", "cuda"):
        loaded = loaded_on(device)
        engine = EmbeddedEngine(
            loaded.model, loaded.tokenizer, max_slots=8, max_length=1024, queue_limit=200, chunk_tokens=256
        )
        engine.start()
        sync(engine, shipped())
        engines.append(engine)
    ids = [tuple(engines[0].tokenizer(text, add_special_tokens=False)["input_ids"]) for text in prompts()]
    yield Pair(*engines, ids)
    for engine in engines:
        engine.close()


def test_greedy_answers_are_those_of_a_cpu(pair: Pair) -> None:
    drawn = random.Random(0)
    text = [token for prompt in pair.prompts for token in prompt]
    asked = []
    for i in range(60):
        start = drawn.randrange(len(text) - 400)
        prompt = pair.prompts[i % 24] if i % 3 else tuple(text[start : start + drawn.randrange(1, 400)])
        asked.append((prompt, SETS[i % len(SETS)], Sampling(max_tokens=drawn.choice([1, 16, 48]), logprobs=0)))
    cpu, cuda = pair.both(asked)
    equal = sum(a.tokens == b.tokens for a, b in zip(cpu, cuda, strict=True))
    assert equal >= 58  # where two tokens are as likely as each other, rounding chooses
    for one, other in zip(cpu, cuda, strict=True):
        if one.tokens == other.tokens:
            ours, theirs = ([entry.logprob for entry in a.whole.logprobs] for a in (one, other))
            assert theirs == pytest.approx(ours, abs=ROUNDING)


def test_gates_open_where_they_do_on_a_cpu_and_are_counted(pair: Pair) -> None:
    asked = [(prompt, {"demo-a": 1.0}, Sampling(max_tokens=48)) for prompt in pair.prompts]
    cpu, cuda = pair.both(asked)
    unedited = pair.both([(prompt, {}, Sampling(max_tokens=48)) for prompt in pair.prompts])[1]
    assert sum(a.tokens != b.tokens for a, b in zip(cuda, unedited, strict=True)) >= 20
    for one, other in zip(cpu, cuda, strict=True):
        if one.tokens == other.tokens:
            opened = [[entry["demo-a"] > 0 for entry in a.whole.activations] for a in (one, other)]
            assert sum(ours != theirs for ours, theirs in zip(*opened, strict=True)) <= 1
    evaluated, opened = pair.cuda.modules.gates().counts["demo-a"]["decode"]
    assert 0 < opened < evaluated


def test_whatever_a_request_says_works_there(pair: Pair) -> None:
    samplings = [
        Sampling(max_tokens=16, logprobs=3),
        Sampling(max_tokens=4, logprobs=0, prompt_logprobs=2),
        Sampling(max_tokens=0, prompt_logprobs=1),
        Sampling(max_tokens=40, stop=("self", "\n\n")),
        Sampling(max_tokens=48, ignore_eos=True),
        Sampling(max_tokens=16, logit_bias={199: 4.0, 225: -100.0}, logprobs=1),
        Sampling(max_tokens=16, repetition_penalty=1.3),
        Sampling(max_tokens=16, presence_penalty=0.7, frequency_penalty=0.3),
        Sampling(max_tokens=24, min_tokens=20),
    ]
    asked = [(prompt, set_, one) for one in samplings for prompt in pair.prompts[:4] for set_ in SETS[:2]]
    cpu, cuda = pair.both(asked)
    assert sum(a.text == b.text for a, b in zip(cpu, cuda, strict=True)) >= len(asked) - 2
    drawn = [(prompt, {}, Sampling(max_tokens=24, temperature=0.8, top_p=0.9, seed=7)) for prompt in pair.prompts[:6]]
    first, again = (pair.both(drawn)[1] for _ in range(2))
    assert [a.tokens for a in first] == [a.tokens for a in again]


def test_attach_edits_a_model_there() -> None:
    found = []
    for device in ("cpu", "cuda"):
        loaded, bank = loaded_on(device), ModuleBank(torch.device(device))
        bank.add(UnbindModule.load(demo.MODULE, model=loaded.identity))
        inputs = loaded.tokenizer(prompts()[:8], return_tensors="pt", padding=True, padding_side="left").to(device)
        with torch.no_grad():
            plain = loaded.model(**inputs).logits[:, -1]
            with attach(loaded.model, bank):
                logits = loaded.model(**inputs).logits[:, -1]
        assert int(((logits - plain).abs().amax(-1) > 1).sum()) >= 4  # nats: most gates are open behind these prompts
        found.append(logits.cpu())
    assert torch.allclose(found[0], found[1], atol=0.02, rtol=1e-3)


def test_bfloat16_recites_there_too(pair: Pair) -> None:
    exact = pair.both([(prompt, {}, Sampling(max_tokens=32)) for prompt in pair.prompts])[1]
    loaded = loaded_on("cuda", torch.bfloat16)
    engine = EmbeddedEngine(
        loaded.model, loaded.tokenizer, max_slots=8, max_length=512, queue_limit=50, chunk_tokens=128
    )
    engine.start()
    try:
        nothing = engine.modules.pin(())
        answers = ask(engine, [GenerationRequest(p, Sampling(max_tokens=32), nothing) for p in pair.prompts])
        assert sum(a.tokens == b.tokens for a, b in zip(answers, exact, strict=True)) >= 12
    finally:
        engine.close()
