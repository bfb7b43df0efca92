"""Answers of a given form are the same in both engines, with whatever else a request asks for."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from server import demo
from server.engine import grammars
from server.engine.engine import Engine
from server.engine.grammars import Form, Grammar
from server.engine.request import GenerationRequest, Sampling
from server.engine.vllm.masks import GrammarMasks
from tests.engines.both import Engines
from tests.engines.test_guards import RUN, WHOLE, guards
from tests.support.asking import Answer, ask
from tests.support.slow_matcher import longest_run
from unbind_core.guard.escapes import AS_JSON

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMS = {
    "json": Form("json", json.dumps(SCHEMA)),
    "regex": Form("regex", "[a-z_]{3,12}\\([a-z, ]*\\):\n( {4}[^\n]*\n){1,3}"),
    "choice": Form("choice", json.dumps(["self.first", "self.second", "return"])),
    "grammar": Form("grammar", 'root ::= "def " [a-z]+ "(" [a-z, ]* ")" | "class " [A-Z] [a-z]+'),
    "text": Form("regex", "(?s:.)*"),
}
ASKED = {
    "plain": Sampling(max_tokens=48),
    "logprobs": Sampling(max_tokens=24, logprobs=3),
    "steered": Sampling(max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={199: 4.0}),
    "least": Sampling(max_tokens=40, min_tokens=20),
    "no end": Sampling(max_tokens=40, ignore_eos=True),
    "stop": Sampling(max_tokens=40, stop=("se", "\n    ")),
}


def compiled(engine: Engine, form: Form) -> Grammar:
    return asyncio.run(engine.grammars.compiled(form))


def shown(answer: Answer) -> tuple[object, ...]:
    whole = answer.whole
    return whole.tokens, whole.text, whole.finish_reason, whole.stop_reason, whole.guarded


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("strips", [False, True])
def test_an_answer_of_a_form_is_the_same_in_both_engines(engines: Engines, asked: str, strips: bool) -> None:
    """Also beside requests without a form, and under modules whose gates open on the way."""
    found: list[list[Answer]] = []
    for engine in engines.both:
        requests: list[GenerationRequest] = []
        for prompt, modules in zip(engines.prompts, ([], ["demo-a"], ["demo-a-paper"]), strict=False):
            request = engines.request(engine, prompt, modules, sampling=ASKED[asked], strips=strips)
            requests += [replace(request, grammar=compiled(engine, form)) for form in FORMS.values()]
            requests.append(request)
        found.append(ask(engine, requests))
    for one, other in zip(*found, strict=True):
        assert shown(one) == shown(other)
        for left, right in zip(one.whole.logprobs, other.whole.logprobs, strict=True):
            assert (left.logprob is None) == (right.logprob is None)
            assert left.logprob is None or left.logprob == pytest.approx(right.logprob, abs=2e-4)
    if asked == "plain" and not strips:
        value = json.loads(found[0][0].text)
        assert isinstance(value["name"], str) and all(isinstance(size, int) for size in value["sizes"])


def test_a_guard_and_a_form_together_are_the_same_in_both_engines(engines: Engines) -> None:
    """The text of any form is steered; where the form leaves nothing but what is barred, the answer ends as guards end it."""
    forms = [FORMS["text"], Form("choice", json.dumps([text[len(text) // 3 :] for text in WHOLE[:2]]))]
    found = []
    for engine in engines.both:
        requests = [
            replace(
                engines.request(engine, prompt, guards=guards("steer"), sampling=Sampling(max_tokens=160)),
                grammar=compiled(engine, form),
                readings=AS_JSON,
            )
            for prompt in engines.prompts[:6]
            for form in forms
        ]
        found.append(ask(engine, requests))
    assert [shown(one) for one in found[0]] == [shown(other) for other in found[1]]
    free, bound = found[0][::2], found[0][1::2]
    assert any(answer.whole.guarded and answer.whole.guarded.bars for answer in free)
    assert all(longest_run(answer.text, WHOLE) < RUN for answer in found[0])
    assert any(answer.whole.finish_reason == "content_filter" for answer in bound)


def test_newest_tokens_are_waited_for_while_somebody_asked_for_a_form_and_no_longer() -> None:
    model = SimpleNamespace(model=str(demo.BASE), get_vocab_size=lambda: 8192)
    config = SimpleNamespace(model_config=model, additional_config={"unbind": {"ends": [0]}})
    masks, told = GrammarMasks(config, torch.device("cpu"), False), list[bool]()
    masks.needs = told.append
    plain = SamplingParams(max_tokens=4)
    formed = SamplingParams(
        max_tokens=4, extra_args={"grammar": Form("regex", "[a-z]+").source(), "owner": "", "done": 0, "or_end": False}
    )
    for removed, added in (([], [(0, plain, [5], [])]), ([], [(1, formed, [5], [])]), ([0], []), ([1], [])):
        masks.update_state(BatchUpdate(2, removed, added, []))
    masks.update_state(None)
    assert told == [False, True, True, False, False]


class Panic(BaseException):
    """As a library's Rust raises it."""


def test_a_grammar_that_fails_in_the_model_s_processes_ends_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that takes longer there than the engine's second: the engine follows the answer, and ends it where it must."""
    model = SimpleNamespace(model=str(demo.BASE), get_vocab_size=lambda: 8192)
    config = SimpleNamespace(model_config=model, additional_config={"unbind": {"ends": [0]}})
    masks = GrammarMasks(config, torch.device("cpu"), False)

    def row(source: str) -> torch.Tensor:
        asked = SamplingParams(max_tokens=4, extra_args={"grammar": source, "owner": "", "done": 0, "or_end": False})
        masks.update_state(BatchUpdate(1, [], [(0, asked, [5], [])], []))
        return masks.apply(torch.zeros(1, 8192))[0]

    monkeypatch.setattr(grammars.time, "thread_time", itertools.count(step=5).__next__)
    assert not row(Form("regex", "[a-z]+").source()).isfinite().all()
    assert row('{"grammars": 1}').isfinite().all()
    for kind in (RuntimeError, Panic):

        def fails(*_: object, kind: type[BaseException] = kind, **__: object) -> None:
            raise kind("of the tests")

        monkeypatch.setattr(grammars.Constraint, "allowed", fails)
        assert row(Form("regex", "[a-z]+").source()).isfinite().all()
    monkeypatch.setattr(grammars.Constraint, "allowed", lambda *_, **__: sys.exit())
    with pytest.raises(SystemExit):
        row(Form("regex", "[a-z]+").source())
