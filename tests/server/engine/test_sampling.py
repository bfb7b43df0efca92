"""How tokens are chosen, on logits made by hand and on the engine."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.embedded.sampler import sample
from server.engine.flights import uniform_source
from server.engine.request import Delta, Flight, GenerationRequest, Sampling
from unbind_core.architecture import LoadedModel

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
PROMPT = tuple(range(20, 60))


def _flight(sampling: Sampling, prompt: Sequence[int] = (4,), output: Sequence[int] = ()) -> Flight:
    text: Any = None
    return Flight(
        GenerationRequest(tuple(prompt), sampling),
        text,
        lambda _: None,
        uniform_source(sampling.seed),
        output=list(output),
    )


def _choose(sampling: Sampling, logits: Tensor = LOGITS, output: Sequence[int] = ()) -> int:
    return sample(logits[None], [_flight(sampling, output=output)])[0][0]


def _frequencies(draws: int = 4000, **options: Any) -> dict[int, float]:
    flights = [_flight(Sampling(temperature=1.0, seed=i, **options)) for i in range(draws)]
    return {token: n / draws for token, n in Counter(sample(LOGITS.expand(draws, -1), flights)[0]).items()}


def test_frequencies_are_the_softmax_of_the_logits() -> None:
    expected = LOGITS.softmax(-1).tolist()
    found = _frequencies()
    assert all(abs(found.get(token, 0) - p) < 0.03 for token, p in enumerate(expected))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.8}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 2}),  # e^-1.5 = 0.22 of the likeliest
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "min_p": 0.3}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
    ],
)
def test_what_is_left_out_is_never_drawn(options: dict[str, float], left: set[int]) -> None:
    assert set(_frequencies(600, **options)) == left


def test_penalties_and_bias_move_the_choice() -> None:
    assert _choose(Sampling()) == 0
    assert _choose(Sampling(presence_penalty=1.5), output=[0]) == 1
    assert _choose(Sampling(frequency_penalty=0.6), output=[0]) == 0
    assert _choose(Sampling(frequency_penalty=0.6), output=[0, 0]) == 1
    assert _choose(Sampling(repetition_penalty=3.0), output=[0]) == 1
    assert _choose(Sampling(logit_bias={3: 10.0})) == 3
    assert _choose(Sampling(logit_bias={0: -100.0})) == 1
    negative = torch.tensor([-1.0, -1.5, -9.0, -9.0, -9.0])
    assert _choose(Sampling(repetition_penalty=2.0), negative, output=[0]) == 1  # a negative logit sinks as well
    assert sample(negative[None], [_flight(Sampling(repetition_penalty=2.0), prompt=(0,))])[0] == [1]


class _Counted(tuple[int, ...]):
    """A prompt that counts how often its tokens are gone through one by one."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()


def test_a_long_prompt_is_not_gone_through_for_every_token() -> None:
    prompt = _Counted((0, 1, 1, 3) * 2000)
    flight = _flight(Sampling(repetition_penalty=3.0), output=[2, 2, 1])
    flight.request = GenerationRequest(prompt, flight.request.sampling)
    before = prompt.times
    row = torch.tensor([2.0, 1.0, 0.5, -1.0, 0.7])  # each divided once, however often it was seen
    assert [sample(row[None], [flight])[0] for _ in range(8)] == [[4]] * 8
    close = torch.tensor([2.0, 1.0, 0.5, -1.0, 0.66])
    assert sample(close[None], [flight])[0] == [0]
    assert prompt.times - before <= 1


def test_a_tiny_temperature_is_greedy_and_a_row_that_is_not_finite_is_told() -> None:
    assert _choose(Sampling(temperature=1e-30, seed=3)) == 0
    broken = LOGITS.clone()
    broken[2] = math.nan
    tokens, sound = sample(torch.stack([LOGITS, broken]), [_flight(Sampling()), _flight(Sampling(temperature=1.0))])
    assert tokens[0] == 0 and sound == [True, False]


def test_parameters_that_leave_no_token_any_mass_still_choose_one() -> None:
    with_infinities = Sampling(temperature=1.0, repetition_penalty=1e-45, seed=1)
    assert 0 <= _choose(with_infinities, output=[0, 1]) < len(LOGITS)


def test_one_request_does_not_see_the_parameters_of_another() -> None:
    alone = [_flight(Sampling(temperature=1.0, seed=5, top_k=3)) for _ in range(2)]
    expected = [sample(LOGITS[None], [alone[0]])[0][0] for _ in range(20)]
    others = [_flight(Sampling(logit_bias={4: 50.0})), _flight(Sampling(temperature=2.0, top_p=0.3, seed=1))]
    mixed = [sample(LOGITS.expand(3, -1), [others[0], alone[1], others[1]])[0][1] for _ in range(20)]
    assert mixed == expected


async def _collect(engine: EmbeddedEngine, **options: Any) -> list[Delta]:
    request = GenerationRequest(PROMPT, Sampling(ignore_eos=True, **options))
    return [delta async for delta in engine.generate(request)]


def test_logprobs_are_the_models_own(engine: EmbeddedEngine, loaded: LoadedModel) -> None:
    deltas = asyncio.run(_collect(engine, max_tokens=5, logprobs=3, prompt_logprobs=2, temperature=0.7, seed=1))
    tokens = [token for delta in deltas for token in delta.tokens]
    scored = [entry for delta in deltas for entry in delta.logprobs]
    prompt = [entry for delta in deltas for entry in delta.prompt_logprobs]
    ids = torch.tensor([[*PROMPT, *tokens]])
    with torch.inference_mode():
        expected = loaded.model(ids).logits[0].log_softmax(-1)
    assert [entry.token for entry in scored] == tokens and prompt[0] is None and len(prompt) == len(PROMPT)
    for position, entry in enumerate([*prompt[1:], *scored]):
        assert entry is not None and entry.token == ids[0, position + 1]
        assert entry.logprob == pytest.approx(expected[position, entry.token].item(), abs=1e-4)
        best = expected[position].topk(len(entry.top))
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert {len(entry.top) for entry in scored} == {3}


def test_a_prompt_can_be_scored_without_an_answer(engine: EmbeddedEngine) -> None:
    (only,) = asyncio.run(_collect(engine, max_tokens=0, prompt_logprobs=0))
    assert only.finish_reason == "length" and not only.tokens and len(only.prompt_logprobs) == len(PROMPT)
    (warm_up,) = asyncio.run(_collect(engine, max_tokens=0))
    assert warm_up.finish_reason == "length" and not warm_up.prompt_logprobs


def test_warming_up_stays_out_of_what_gates_are_counted_and_changes_no_answer(engine: EmbeddedEngine) -> None:
    async def run() -> tuple[list[Delta], list[Delta]]:
        plain = GenerationRequest(PROMPT, Sampling(ignore_eos=True, max_tokens=6), engine.modules.pin({"one": 1.0}))
        warm = GenerationRequest(PROMPT, Sampling(max_tokens=0), engine.modules.pin({"one": 1.0}))
        alone = [delta async for delta in engine.generate(plain)]
        before = engine.gate_counts().result(10)
        _ = [delta async for delta in engine.generate(warm)]
        assert engine.gate_counts().result(10) == before
        return alone, [delta async for delta in engine.generate(plain)]

    alone, after = asyncio.run(run())
    made = [[token for delta in deltas for token in delta.tokens] for deltas in (alone, after)]
    assert made[0] == made[1]


def test_logprobs_of_some_do_not_change_the_answers_of_others(engine: EmbeddedEngine) -> None:
    async def run() -> list[list[Delta]]:
        return await asyncio.gather(
            _collect(engine, max_tokens=8),
            _collect(engine, max_tokens=8, logprobs=1),
            _collect(engine, max_tokens=8, logprobs=0, prompt_logprobs=1),
        )

    answers = [[token for delta in deltas for token in delta.tokens] for deltas in asyncio.run(run())]
    assert answers[0] == answers[1] == answers[2]


def test_no_bias_is_none_however_it_is_written() -> None:
    expected = _choose(Sampling(presence_penalty=1.5), output=(0,))
    assert _choose(Sampling(presence_penalty=1.5, logit_bias={}), output=(0,)) == expected == 1
    assert _choose(Sampling(presence_penalty=1.5, logit_bias={2: 5.0}), output=(0,)) == 2
