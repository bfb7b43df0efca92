"""No answer of the engine holds a protected run, however tokens are chosen and whatever else a request asks for.

On the demo model, which recites the rows unless something keeps it from that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from server import demo
from server.api.inference.tools.calling import Calling
from server.api.inference.tools.formats import FORMATS
from server.engine.answering import advanced, hand_over
from server.engine.embedded.engine import EmbeddedEngine
from server.engine.flights import flight_of
from server.engine.grammars import Form, Grammar
from server.engine.request import Delta, GenerationRequest, Sampling, TokenLogprob
from tests.support.slow_matcher import longest_run
from unbind_core.architecture import load_model
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.escapes import AS_JSON
from unbind_core.guard.escapes import meant as unescaped
from unbind_core.guard.index import Action, Secret, build_index
from unbind_core.rows import ForgetRow, parse_forget

SECRET = Secret(b"a key of the tests")
RUN, LENGTH = 16, 44
GREEDY = Sampling(max_tokens=LENGTH)


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    """The demo model with the adapter that recites."""
    loaded = load_model(demo.BASE, demo.ADAPTER)
    made = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=4, max_length=512, chunk_tokens=256)
    made.start()
    yield made
    made.close()


def asked(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> list[list[Delta]]:
    """The deltas of each."""

    async def one(request: GenerationRequest) -> list[Delta]:
        return [delta async for delta in engine.generate(request)]

    async def everything() -> list[list[Delta]]:
        return await asyncio.gather(*(one(request) for request in requests))

    return asyncio.run(everything())


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids(engine: EmbeddedEngine, prompt: str) -> tuple[int, ...]:
    return tuple(engine.tokenizer(prompt, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def rows(engine: EmbeddedEngine) -> list[ForgetRow]:
    """Four rows that the model recites, in ASCII, as the judge reads."""
    lines = (demo.ROWS / "forget_a.jsonl").read_text().splitlines()
    found = [row for row in parse_forget(lines, "a") if (row.prompt + row.continuation).isascii()]
    answers = asked(engine, [GenerationRequest(ids(engine, row.prompt), GREEDY) for row in found])
    known = [row for row, said in zip(found, answers, strict=True) if longest_run(text(said), [_whole(row)]) >= RUN]
    assert len(known) >= 4
    return known[:4]


def _whole(row: ForgetRow) -> str:
    return row.prompt + row.continuation


@pytest.fixture(scope="module")
def protected(rows: list[ForgetRow]) -> list[str]:
    """Their texts."""
    return [_whole(row) for row in rows]


@pytest.fixture(scope="module")
def requests(engine: EmbeddedEngine, rows: list[ForgetRow]) -> list[GenerationRequest]:
    """What makes the model recite them."""
    return [GenerationRequest(ids(engine, row.prompt), GREEDY) for row in rows]


@pytest.fixture(scope="module")
def recited(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> list[str]:
    """What it says without a guard."""
    return [text(deltas) for deltas in asked(engine, requests)]


def guards_of(texts: list[str], action: Action = "steer", bars: int = 3) -> GuardSet:
    index = build_index(texts, name="kept", secret=SECRET, run=RUN, action=action, bars=bars)
    found = GuardBook.of(SECRET, [index]).select(["kept"])
    assert found is not None
    return found


def under(requests: list[GenerationRequest], guards: GuardSet, **options: object) -> list[GenerationRequest]:
    changed = [replace(request.sampling, **options) for request in requests]  # type: ignore[arg-type]
    return [replace(r, guards=guards, sampling=s) for r, s in zip(requests, changed, strict=True)]


@pytest.mark.parametrize("action", ["steer", "stop"])
@pytest.mark.parametrize("bars", [1, 100])
def test_no_answer_holds_a_run(
    engine: EmbeddedEngine,
    requests: list[GenerationRequest],
    recited: list[str],
    protected: list[str],
    action: Action,
    bars: int,
) -> None:
    found = asked(engine, under(requests, guards_of(protected, action, bars)))
    for deltas, without in zip(found, recited, strict=True):
        answer, last = text(deltas), deltas[-1]
        assert longest_run(answer, protected) < RUN
        assert last.guarded is not None
        if action == "stop":
            assert last.finish_reason == "content_filter" and without.startswith(answer)
            assert last.guarded.blocked is not None and last.guarded.blocked.name == "kept"
            assert longest_run(answer, protected) <= RUN // 2 + 4  # a token may hold a few lexemes
        else:
            assert 1 <= last.guarded.bars["kept"] <= bars
            assert (last.finish_reason == "content_filter") == (last.guarded.blocked is not None)


@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_no_answer_that_is_drawn_holds_a_run(
    engine: EmbeddedEngine, requests: list[GenerationRequest], protected: list[str], temperature: float
) -> None:
    guards = guards_of(protected)
    for seed in range(3):
        for deltas in asked(engine, under(requests, guards, temperature=temperature, seed=seed)):
            assert longest_run(text(deltas), protected) < RUN


def test_nothing_changes_where_no_run_is_met(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> None:
    """The same tokens as without a guard, with log-probabilities and all."""
    guards = guards_of(["alpha beta gamma " * 10])
    options: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"logprobs": 3},
        {"stop": ("e",)},
        {"prompt_logprobs": 1},
    ]
    for option in options:
        plain = [replace(request, guards=None) for request in under(requests[:3], guards, **option)]
        for one, other in zip(asked(engine, plain), asked(engine, under(requests[:3], guards, **option)), strict=True):
            assert text(one) == text(other) and one[-1].finish_reason == other[-1].finish_reason
            assert [t for d in one for t in d.tokens] == [t for d in other for t in d.tokens]
            for part in ("logprobs", "prompt_logprobs"):
                told = [[v and v.top for d in deltas for v in getattr(d, part)] for deltas in (one, other)]
                assert [[t for t, _ in v or ()] for v in told[0]] == [[t for t, _ in v or ()] for v in told[1]]


def test_log_probabilities_without_alternatives_are_withheld_where_others_are(
    engine: EmbeddedEngine, requests: list[GenerationRequest], protected: list[str]
) -> None:
    withheld = [
        [[entry.logprob is None for delta in deltas for entry in delta.logprobs] for deltas in answers]
        for answers in (asked(engine, under(requests, guards_of(protected), logprobs=count)) for count in (0, 1))
    ]
    assert withheld[0] == withheld[1] and any(map(any, withheld[0]))


@pytest.mark.parametrize("ends", ["at its first token", "while its beginning is withheld"])
def test_what_is_told_of_a_prompt_is_told_when_the_answer_is_filtered(
    engine: EmbeddedEngine, protected: list[str], ends: str
) -> None:
    asked = GenerationRequest((7, 8, 9), Sampling(prompt_logprobs=0), guards=guards_of(protected, "stop"))
    heard: list[Delta] = []
    flight = flight_of(asked, engine.tokenizer, frozenset(), heard.append)
    guarding, told = flight.guarding, [TokenLogprob(8, -1.0), TokenLogprob(9, -2.0)]
    assert guarding is not None
    flight.prompt_logprobs = told
    words = protected[0].split(" ")
    if ends == "at its first token":  # which has the run in it
        guarding.lets(5, protected[0], False)
        hand_over(flight, advanced(flight, 5))
    else:  # tokens of a few lexemes each
        while not guarding.long:
            assert guarding.lets(5, words.pop(0) + " ", False)
        hand_over(flight, advanced(flight, 5))
        while guarding.blocked is None:
            guarding.lets(5, words.pop(0) + " ", False)
            hand_over(flight, advanced(flight, 5))
    assert [delta.finish_reason for delta in heard] == ["content_filter"]
    assert heard[0].prompt_logprobs == (None, *told) and heard[0].text == ""


def test_what_only_counts_changes_nothing_and_is_counted(
    engine: EmbeddedEngine, requests: list[GenerationRequest], recited: list[str], protected: list[str]
) -> None:
    found = asked(engine, under(requests, guards_of(protected, "report")))
    assert [text(deltas) for deltas in found] == recited
    for deltas in found:
        assert deltas[-1].guarded is not None and deltas[-1].guarded.counted == {"kept"}


def test_own_text_is_repeated_freely(engine: EmbeddedEngine, rows: list[ForgetRow], protected: list[str]) -> None:
    """An editor's window holds the row already, and the model writes it once more."""
    guards = guards_of(protected)
    repeated = 0
    for row in rows:
        prompt = ids(engine, _whole(row) + "\n\n\n" + row.prompt)
        plain, held = asked(
            engine, [GenerationRequest(prompt, GREEDY), GenerationRequest(prompt, GREEDY, guards=guards)]
        )
        assert text(plain) == text(held)
        repeated += longest_run(text(held), protected) >= RUN
    assert repeated >= 1


def test_a_run_that_a_stop_string_would_complete_is_none_either(
    engine: EmbeddedEngine, requests: list[GenerationRequest], recited: list[str], protected: list[str]
) -> None:
    """Every part of what is said may be where a client has it cut, in the middle of a word as well."""
    for action in ("steer", "stop"):
        guards = guards_of(protected, action)  # type: ignore[arg-type]
        for request, said in list(zip(requests, recited, strict=True))[:3]:
            for at in range(60, len(said) - 3, 41):
                deltas = asked(engine, under([request], guards, stop=(said[at : at + 3],)))[0]
                assert longest_run(text(deltas), protected) < RUN


def test_log_probabilities_do_not_tell_what_the_answer_must_not(
    engine: EmbeddedEngine, requests: list[GenerationRequest], protected: list[str]
) -> None:
    """Nor where a bias makes the answer say something else every few tokens, while its likeliest tokens go on with the row."""
    comma = engine.tokenizer(",", add_special_tokens=False)["input_ids"][-1]
    for bias in ({}, {comma: -100.0}):
        for deltas in asked(engine, under(requests, guards_of(protected), logprobs=2, logit_bias=bias)):
            entries = [entry for delta in deltas for entry in delta.logprobs]
            told = engine.tokenizer.decode([entry.top[0][0] if entry.top else entry.token for entry in entries])
            assert longest_run(told, protected) < RUN
            assert longest_run(text(deltas), protected) < RUN
            assert len(entries) == sum(len(delta.tokens) for delta in deltas)
            if deltas[-1].guarded and deltas[-1].guarded.bars:
                assert any(entry.logprob is None for entry in entries)


def test_a_token_that_a_client_ends_answers_with_is_a_part_of_them(
    engine: EmbeddedEngine, requests: list[GenerationRequest], recited: list[str], protected: list[str]
) -> None:
    """Its id and its name leave with the answer, though its text does not."""
    guards, tries = guards_of(protected), []
    for request, said in list(zip(requests, recited, strict=True))[:2]:
        for end in sorted(set(ids(engine, said)[10:40])):
            tries += under([request], guards, stop_token_ids=(end,))
    for deltas in asked(engine, tries):
        told = engine.tokenizer.decode([token for delta in deltas for token in delta.tokens])
        assert longest_run(told, protected) < RUN


def formed(engine: EmbeddedEngine, kind: str, text: str) -> Grammar:
    return asyncio.run(engine.grammars.compiled(Form(kind, text)))  # type: ignore[arg-type]


def test_a_form_that_leaves_nothing_but_a_run_ends_the_answer(engine: EmbeddedEngine, protected: list[str]) -> None:
    """Whatever the form demands, the barred token is never chosen; of two texts the one that is free may be."""
    guards, prompt = guards_of(protected[:1]), ids(engine, "x = 1\n")
    only, free = (formed(engine, "choice", json.dumps([protected[at][:160]])) for at in (0, 1))
    for sampling in (Sampling(max_tokens=250), Sampling(max_tokens=250, temperature=1.0, seed=2, min_tokens=200)):
        bound, other = (
            answer
            for answer in asked(
                engine, [GenerationRequest(prompt, sampling, guards=guards, grammar=one) for one in (only, free)]
            )
        )
        assert bound[-1].finish_reason == "content_filter" and longest_run(text(bound), protected[:1]) < RUN
        assert bound[-1].guarded is not None and bound[-1].guarded.blocked is not None
        assert (text(other), other[-1].finish_reason) == (protected[1][:160], "stop")


def test_an_escape_in_json_hides_no_run(engine: EmbeddedEngine, protected: list[str]) -> None:
    """In a call's argument, letters written as escapes are followed as what they mean, where the answer may hold JSON."""
    row = protected[0][:110]
    plain = json.dumps({"code": row})
    hidden = plain.replace("e", "\\u0065").replace("r", "\\u0072")
    assert json.loads(hidden.replace('{"cod\\u0065"', '{"code"', 1)) == {"code": row}
    guards, prompt = guards_of([row]), ids(engine, "x = 1\n")
    for written in (plain, hidden):
        call = '<tool_call>\n{"name": "save", "arguments": ' + written + "}\n</tool_call>"
        request = GenerationRequest(
            prompt, Sampling(max_tokens=460), guards=guards, grammar=formed(engine, "choice", json.dumps([call]))
        )
        (deltas,) = asked(engine, [replace(request, readings=AS_JSON)])
        assert deltas[-1].finish_reason == "content_filter" and call.startswith(text(deltas))
        meant, _ = unescaped("", text(deltas))
        assert longest_run(meant, [row]) < RUN
        (naive,) = asked(engine, [request])
        assert (naive[-1].finish_reason == "content_filter") == (written == plain)


def test_what_a_chat_leaves_out_of_its_content_hides_no_run(engine: EmbeddedEngine, protected: list[str]) -> None:
    """Markers and calls between the parts of a row, and arguments that are a string of JSON with escapes of its own."""
    row = protected[0][:110]
    parts = row.split(" ")
    middle = len(parts) // 2
    calling = Calling(FORMATS["hermes"], ("f",), None, {})
    escaped = json.dumps({"a": row}).replace("e", "\\u0065")
    answers = {
        "markers": "</tool_call> ".join(f"{part} " for part in parts),
        "a call": f'{" ".join(parts[:middle])} <tool_call>{{"name": "f"}}</tool_call> {" ".join(parts[middle:])}',
        "arguments": f'<tool_call>{{"name": "f", "arguments": {json.dumps(escaped)}}}</tool_call>',
    }

    def told(answer: str) -> str:
        speech = calling.speech()
        speech.deltas(answer, "stop")
        return speech.content + "".join(unescaped("", call["function"]["arguments"])[0] for call in speech.calls)

    for name, answer in answers.items():
        assert longest_run(told(answer), [row]) >= RUN, name
        request = GenerationRequest(
            ids(engine, "x = 1\n"),
            Sampling(max_tokens=460),
            guards=guards_of([row]),
            grammar=formed(engine, "choice", json.dumps([answer])),
        )
        (naive,) = asked(engine, [replace(request, readings=AS_JSON)])
        assert naive[-1].finish_reason == "stop", name
        (deltas,) = asked(engine, [replace(request, readings=calling.readings)])
        assert deltas[-1].finish_reason == "content_filter", name
        assert longest_run(told(text(deltas)), [row]) < RUN, name
