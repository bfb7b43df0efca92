"""The score of a continuation, read as evaluation harnesses read it, is the model's own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

from server.api.inference import answers, completions, logprobs, prompts
from tests.support.live import Live
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import encode

PAIRS = (
    ("def add(first, second):\n", "    return first + second\n"),
    ("class Reader:", " pass"),
    ("x", " = '€' # a token of several bytes\n\n\n"),
    ("import os\nimport sys\n" * 6, "import re\n"),
)


def expected(loaded: LoadedModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The sum of the continuation's log-probabilities, and whether each of its tokens is the likeliest."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        rows = loaded.model(ids).logits[0].float().log_softmax(-1)[len(context) - 1 : -1]
    wanted = torch.tensor(continuation)
    total = rows.double().gather(1, wanted[:, None]).sum().item()
    return total, bool((rows.argmax(-1) == wanted).all())


def read(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """The same from an answer: what stands behind the context, less the one token that had to be made."""
    scores = choice["logprobs"]["token_logprobs"][context:-1]
    tops = choice["logprobs"]["top_logprobs"][context:-1]
    greedy = all(score == max(top.values()) for score, top in zip(scores, tops, strict=True))
    return sum(scores), greedy


@pytest.mark.parametrize("together", [False, True])
def test_a_continuation_has_the_score_that_the_model_gives_it(
    server: Live, loaded: LoadedModel, together: bool
) -> None:
    tokenizer = server.service.loaded.tokenizer
    pairs = [(encode(tokenizer, first), encode(tokenizer, second)) for first, second in PAIRS]
    fields = {"temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1234}
    prompts = [first + second for first, second in pairs]
    if together:
        choices = server.complete(prompt=prompts, **fields).body["choices"]
    else:
        choices = [server.complete(prompt=prompt, **fields).body["choices"][0] for prompt in prompts]
    for (context, continuation), choice in zip(pairs, choices, strict=True):
        total, greedy = read(choice, len(context))
        wanted, likeliest = expected(loaded, context, continuation)
        assert total == pytest.approx(wanted, abs=1e-4) and greedy is likeliest
    own = server.complete(prompt=prompts[0], max_tokens=6, ignore_eos=True, logprobs=0).body["choices"][0]["text"]
    made = encode(tokenizer, own)
    (scored,) = server.complete(prompt=prompts[0] + made, **fields).body["choices"]
    total, _ = read(scored, len(prompts[0]))
    assert total == pytest.approx(expected(loaded, prompts[0], made)[0], abs=1e-4)


def test_many_scores_are_written_apart_from_the_event_loop(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, in which everybody would wait, ``/health`` too. What is written is the same."""
    written: list[tuple[int, bool]] = []  # tokens, and whether on the event loop

    class Watched(logprobs.LegacyLogprobs):
        def of(self, entries: Any, *more: Any) -> Any:
            written.append((len(entries), asyncio._get_running_loop() is not None))
            return super().of(entries, *more)

    monkeypatch.setattr(completions, "LegacyLogprobs", Watched)
    fields = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}
    ids = [5 + number % 200 for number in range(240)]
    (one,) = server.complete(prompt=ids, **fields).body["choices"]
    many = server.complete(prompt=[ids] * 4, **fields)
    assert written == [(241, True), *[(241, False)] * 4]
    assert many.raw == json.dumps(many.body, ensure_ascii=False, separators=(",", ":")).encode()
    for choice in many.body["choices"]:
        assert choice["text"] == one["text"] and choice["logprobs"]["tokens"] == one["logprobs"]["tokens"]
    monkeypatch.setattr(answers, "INLINE", 100)
    del written[:]
    assert server.complete(prompt=ids, stream=True, **fields).events
    assert (241, False) in written and not any(on_loop for tokens, on_loop in written if tokens > 100)


def test_more_scores_of_prompts_than_fit_are_refused_by_the_field_that_asks(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_SCORES", 100)
    fields = {"prompt": [9] * 20, "max_tokens": 1}
    assert server.complete(**fields, echo=True, logprobs=4).status == 200
    assert server.complete(**fields, logprobs=20).status == 200
    for name, asked in (
        ("logprobs", {"echo": True, "logprobs": 5}),
        ("logprobs", {"echo": True, "logprobs": 1, "n": 3}),
        ("prompt_logprobs", {"prompt_logprobs": 5}),
    ):
        refused = server.complete(**fields, **asked)
        assert (refused.status, refused.error["param"]) == (400, name), refused.raw
        assert refused.error["code"] == "too_many_scores"
