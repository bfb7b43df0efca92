"""Answers have the form that is asked for: a real validator takes what the engine makes, whatever else a request says."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import grammar_from

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.grammars import LONGEST, OWN, REMEMBERED, Form, Grammar, GrammarError, Grammars, GrammarsBusy
from server.engine.request import Delta, GenerationRequest, Sampling

PROMPTS = [(5, 9, 12, 40), (7, 8, 9), tuple(range(20, 60)), (5, 9, 12, 41)]


def ask(engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> list[Delta]:
    """The answers of requests that run at the same time, each as one delta."""

    async def one(request: GenerationRequest) -> Delta:
        parts = [delta async for delta in engine.generate(request)]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.then(part)
        return whole

    async def everything() -> list[Delta]:
        return await asyncio.gather(*(one(request) for request in requests))

    return asyncio.run(everything())


def grammar(engine: EmbeddedEngine, kind: Any, text: Any, **options: Any) -> Grammar:
    written = text if isinstance(text, str) else json.dumps(text)
    return asyncio.run(engine.grammars.compiled(Form(kind, written, **options)))


def request(made: Grammar | None, prompt: Sequence[int] = PROMPTS[0], **sampling: Any) -> GenerationRequest:
    given = {"max_tokens": 150, "temperature": 1.0, "seed": 1, **sampling}
    return GenerationRequest(tuple(prompt), Sampling(**given), grammar=made)


simple = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 8)),
    st.builds(
        lambda a, n: {"type": "integer", "minimum": a, "maximum": a + n}, st.integers(-50, 50), st.integers(0, 99)
    ),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda v: {"enum": v}, st.lists(st.sampled_from(["a", "b c", 1, None, True, 2.5]), min_size=1, unique=True)
    ),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}[0-9]?$"}),
)


def _object(properties: dict[str, Any], required: int) -> dict[str, Any]:
    names = list(properties)[:required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


schemas = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(lambda one, n: {"type": "array", "items": one, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(
            _object, st.dictionaries(st.sampled_from(["a", "name", "x y", "ü"]), inner, max_size=3), st.integers(0, 3)
        ),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas, seed=st.integers(0, 10_000))
def test_whatever_the_schema_the_answer_is_valid(engine: EmbeddedEngine, schema: dict[str, Any], seed: int) -> None:
    answer = ask(engine, [request(grammar(engine, "json", schema), seed=seed, temperature=1.5, max_tokens=200)])[0]
    if answer.finish_reason == "length":
        assert len(answer.tokens) == 200
        return
    assert answer.finish_reason == "stop"
    assert jsonschema_rs.is_valid(schema, json.loads(answer.text)), (schema, answer.text)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"logit_bias": {str(token): 50.0 for token in range(30)}},
    {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"min_tokens": 120, "max_tokens": 150},
    {"ignore_eos": True},
    {"top_k": 1},
    {"top_p": 0.01, "min_p": 0.9},
    {"logprobs": 2},
]


def test_every_way_of_choosing_tokens_keeps_to_the_form_and_to_itself(engine: EmbeddedEngine) -> None:
    """Also beside rows of other forms and of none, whose answers stay as they are; and again, from what was kept of the prompt."""
    number = grammar(engine, "regex", "[1-9][0-9]{3}(-[0-9]{2}){1,3}")
    fields = [
        {**one, "logit_bias": {int(t): b for t, b in one.get("logit_bias", {}).items()} or ()} for one in SAMPLINGS
    ]
    bound = [request(number, PROMPTS[i % 4], **one) for i, one in enumerate(fields)]
    free = [request(None, PROMPTS[i % 4], **{**one, "max_tokens": 12, "min_tokens": 0}) for i, one in enumerate(fields)]
    other = [request(grammar(engine, "choice", ["yes", "no"]), seed=seed) for seed in range(4)]
    alone = [ask(engine, [one])[0] for one in (*bound, *free)]
    mixed = ask(engine, [one for pair in zip(bound, free, strict=True) for one in pair][:10])
    assert [one.tokens for one in mixed] == [
        one.tokens for pair in zip(alone[: len(bound)], alone[len(bound) :], strict=True) for one in pair
    ][:10]
    for answer in alone[: len(bound)]:
        assert re.fullmatch("[1-9][0-9]{3}(-[0-9]{2}){1,3}", answer.text) and answer.finish_reason == "stop"
        assert answer.stop_reason is None
    assert {answer.text for answer in ask(engine, other)} <= {"yes", "no"}
    scored = alone[SAMPLINGS.index({"logprobs": 2})]
    assert len(scored.logprobs) == len(scored.tokens) and all(len(one.top) == 2 for one in scored.logprobs)


def test_a_limit_cuts_and_a_stop_string_stops(engine: EmbeddedEngine) -> None:
    digits = grammar(engine, "regex", "[0-9]{20}")
    cut, whole, stopped = ask(
        engine,
        [
            request(digits, max_tokens=5),
            request(grammar(engine, "regex", "[0-9]{5}"), max_tokens=5),
            request(grammar(engine, "regex", "(ab,)+"), stop=(",",)),
        ],
    )
    assert (cut.finish_reason, len(cut.tokens)) == ("length", 5) and cut.text.isdigit()
    assert (whole.finish_reason, len(whole.text)) == ("stop", 5)
    assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == ("stop", ",", "ab")


def test_log_probabilities_are_the_models_own(engine: EmbeddedEngine) -> None:
    """Those of what the model would have said come beside those of what it must say."""
    bound = ask(engine, [request(grammar(engine, "regex", "[0-9]{3}"), temperature=0, logprobs=1)])[0]
    free = ask(engine, [request(None, temperature=0, logprobs=1, max_tokens=1)])[0]
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].rank > 1


# 500 rules, each of which may follow any other: a row of the parser holds all of them
ROWS = "start: START (" + " | ".join(f"r{i}" for i in range(500)) + ")\n"
ROWS += "\n".join(f'r{i}: "a"* r{(i * 7 + 1) % 500} "b" | "c" | ("ab" | "a" | "b")*' for i in range(500))
HOSTILE = {
    "too large": ("json", {"enum": ["x" * LONGEST]}, "the most"),
    "too many": ("json", {"type": "array", "maxItems": 1_000_000, "items": {"type": "string"}}, "the most"),
    "hidden": ("grammar", 'start: %json {"$ref": "#/x", "x": {"type": "array", "max\\u0049tems": 1e9}}', "the most"),
    "long": ("json", {"type": "array", "maxItems": 49_999, "items": {"type": "string"}}, "grammar size"),
    "too deep": ("json", '{"items":' * 400 + "{}" + "}" * 400, "compile|understood|nest"),
    "unbalanced": ("regex", "(", "compile"),
    "unknown keyword": ("json", {"not": {"type": "string"}}, "Unimplemented"),
    "elsewhere": ("json", {"$ref": "https://example.org/x"}, "retriev|fetch"),
    "nothing": ("json", False, "Unsatisfiable"),
    "no grammar": ("grammar", "root ::= (", "understood"),
    "nested": ("grammar", "root ::= " + "(" * 30_000, "understood"),
    "no JSON": ("json", "{", "understood"),
    "costly at first": ("regex", "((a{100}){100}){100}", "kept to: lexer error"),
    "costly rows": ("grammar", ROWS.replace("START", '"a"'), "kept to: Parser Error"),
    "never ends": ("json", {"$ref": "#"}, "nothing fulfils it"),
    "without end": ("json", {"allOf": [{"type": "string", "pattern": f".*{i}"} for i in range(50)]}, "over 1 s"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_compiled_is_refused_off_the_event_loop(engine: EmbeddedEngine, name: str) -> None:
    kind, text, reason = HOSTILE[name]
    ticks = 0

    async def meanwhile() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async def tried() -> None:
        ticking = asyncio.create_task(meanwhile())
        written = text if isinstance(text, str) else json.dumps(text)
        try:
            await engine.grammars.compiled(Form(kind, written))  # type: ignore[arg-type]
        finally:
            ticking.cancel()

    with pytest.raises(GrammarError, match=reason):
        asyncio.run(tried())
    assert ticks > 20 or name != "costly at first"
    assert ask(engine, [request(grammar(engine, "choice", ["fine"]))])[0].text == "fine"


@pytest.mark.parametrize("text", ['"\\n" * 500_000 + "a"', '"start: /" + "\\\\" * 2_000_000 + "/"'])
def test_rows_of_what_means_nothing_are_read_once(text: str) -> None:
    """Read anew from each of them on, these take an hour in which no other thread goes on; a process of its own can be ended."""
    code = f"from server.engine import grammars as g\ng.LONGEST = 10**7\ng._items(g.Form('grammar', {text}).source())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert not ended.returncode or "is not understood: Failed to convert" in ended.stderr, ended.stderr


@pytest.mark.parametrize("begins", ["", "\n", " \n\t ", "# b\r\n", 'root ::= "a" ', "x"])
@pytest.mark.parametrize("says", ['start: "a"', 'start \n : "a"', '%llguidance {}\nstart: "a"', 'root ::= "start:"'])
def test_grammars_are_told_apart_as_the_library_tells_them(begins: str, says: str) -> None:
    def read(source: Callable[[], str]) -> str:
        try:
            return source()
        except (ValueError, GrammarError) as error:
            return str(error).removeprefix("is not understood: ")

    assert read(Form("grammar", begins + says).source) == read(lambda: grammar_from("grammar", begins + says))


@pytest.mark.parametrize("name", ["costly at first", "never ends"])
def test_what_cannot_be_kept_to_is_refused_again(engine: EmbeddedEngine, name: str) -> None:
    kind, text, _ = HOSTILE[name]
    for _ in range(2):
        with pytest.raises(GrammarError, match="cannot be kept to"):
            grammar(engine, kind, text)


LATE = {
    "lexer": ("regex", "[0-9]{3}((a{100}){100}){100}"),
    "rows": ("grammar", ROWS.replace("START", "/[0-9]{3}/")),
}


@pytest.mark.parametrize("name", LATE)
def test_a_form_that_becomes_too_much_ends_its_answer_alone_and_soon(engine: EmbeddedEngine, name: str) -> None:
    """Also where it is asked for again: what one answer has used up does not pass for an answer that is complete."""
    for _ in range(2):
        made = grammar(engine, *LATE[name])
        started = time.thread_time()
        constraint = made.begin()
        while not constraint.failed:
            constraint.take(int(constraint.allowed().argmax()))
        assert time.thread_time() - started < 1
        failed = ask(engine, [request(grammar(engine, *LATE[name]))])[0]
        assert failed.finish_reason == "error" and "too much for it" in str(failed.error)
        assert ask(engine, [request(grammar(engine, "choice", ["fine"]))])[0].text == "fine"
        assert made.spent and grammar(engine, *LATE[name]) is not made


def test_a_spent_grammar_allows_no_empty_answer(engine: EmbeddedEngine) -> None:
    """Who has it from before it was spent is told so."""
    made = grammar(engine, *LATE["lexer"])
    first = made.begin()
    while not first.failed:
        first.take(int(first.allowed().argmax()))
    assert ask(engine, [request(made)])[0].finish_reason == "error"


def test_what_one_owner_uses_up_of_a_form_ends_no_answer_of_another(engine: EmbeddedEngine) -> None:
    kind, text = LATE["lexer"]
    form = Form(kind, text)  # type: ignore[arg-type]
    mine, theirs = (asyncio.run(engine.grammars.compiled(form, owner)) for owner in ("me", "they"))
    constraint = mine.begin()
    while not constraint.failed:
        constraint.take(int(constraint.allowed().argmax()))
    assert ask(engine, [request(mine, max_tokens=2)])[0].finish_reason == "error"
    assert ask(engine, [request(theirs, max_tokens=2)])[0].finish_reason == "length"


def test_a_lenient_schema_leaves_out_what_no_grammar_holds(engine: EmbeddedEngine) -> None:
    made = grammar(engine, "json", {"type": "string", "maxLength": 3, "not": {"const": "abc"}}, lenient=True)
    assert isinstance(json.loads(ask(engine, [request(made)])[0].text), str)


def test_a_bounded_number_of_grammars_is_remembered(engine: EmbeddedEngine) -> None:
    grammars: Grammars = engine.grammars
    first = grammar(engine, "choice", ["first"])
    assert grammar(engine, "choice", ["first"]) is first
    for number in range(REMEMBERED):
        grammar(engine, "choice", [f"one {number}"])
    assert grammar(engine, "choice", ["first"]) is not first
    assert len(grammars._known) == REMEMBERED


def test_who_brings_many_forms_holds_up_no_form_that_is_known(engine: EmbeddedEngine) -> None:
    grammars, known = engine.grammars, Form("regex", "[a-z ]+")
    costly = [Form("json", json.dumps({"type": "object", "properties": _many(300, 50 + n)})) for n in range(OWN + 1)]

    async def everything() -> list[Grammar]:
        made = await grammars.compiled(known, "mine")
        with grammars._compiling:  # as for the longest time that one takes
            asked = [asyncio.ensure_future(grammars.compiled(form, "theirs")) for form in costly]
            done, waiting = await asyncio.wait(asked, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            (refused,) = done
            assert isinstance(refused.exception(), GrammarsBusy)
            assert await asyncio.wait_for(grammars.compiled(known, "mine"), 5) is made
            asked[0].cancel()  # a client that leaves makes no room: the thread is at its form
            hurried = asyncio.ensure_future(grammars.compiled(costly[0], "theirs"))
            await asyncio.wait([hurried], timeout=20)
            assert isinstance(hurried.exception(), GrammarsBusy)
        return await asyncio.gather(*waiting - {asked[0]})

    assert len(asyncio.run(everything())) == OWN - 1 and not grammars._wanted
    for number in range(REMEMBERED):
        asyncio.run(grammars.compiled(Form("choice", json.dumps([f"two {number}"])), "theirs"))
    assert ("mine", known.source()) in grammars._known


def test_forms_of_owners_have_turns(engine: EmbeddedEngine) -> None:
    grammars, ended = engine.grammars, list[str]()

    async def ask(owner: str, number: int) -> None:
        await grammars.compiled(Form("choice", json.dumps([f"{owner} {number}"])), owner)
        ended.append(f"{owner} {number}")

    async def everything() -> None:
        with grammars._compiling:  # as for the longest time that one takes
            every = [*(("theirs", n) for n in range(5)), ("mine", 0)]
            asked = [asyncio.ensure_future(ask(*one)) for one in every]
            await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(grammars._reading, str)  # behind all of them
            assert grammars._wanted.total() == len(every)
        await asyncio.gather(*asked)

    asyncio.run(asyncio.wait_for(everything(), 60))
    assert ended == ["theirs 0", "mine 0", *(f"theirs {n}" for n in range(1, 5))]


@pytest.fixture
def another(engine: EmbeddedEngine) -> Iterator[Grammars]:
    """Of the same tokenizer, with nothing compiled and no process yet."""
    made = Grammars(engine.grammars._tokenizer, engine.grammars._width, engine.grammars._ends)
    yield made
    made.close()


def test_forms_are_tried_by_this_program_wherever_it_runs(
    another: Grammars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many a working directory has a folder of the same name, whose code is not to run."""
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(another.compiled(Form("regex", "[a-z]+"))).begin().allowed().any()


def test_who_waits_for_a_form_is_let_go_at_the_end(another: Grammars) -> None:
    async def everything() -> None:
        with another._compiling:
            forms = [Form("choice", json.dumps([str(number)])) for number in range(2)]
            asked = [asyncio.ensure_future(another.compiled(form)) for form in forms]
            await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(another._reading, str)  # behind both
            another.close()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asked[1], 30)
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(everything())


def _many(count: int, longest: int) -> dict[str, object]:
    return {f"p{n}": {"type": ["string", "null"], "pattern": f"^[a-z]{{1,{longest}}}$"} for n in range(count)}


def test_a_request_that_nobody_waits_for_frees_its_slot(engine: EmbeddedEngine) -> None:
    async def leave() -> None:
        async for _ in engine.generate(request(grammar_made, max_tokens=180)):
            break
        for _ in range(400):
            if not engine.stats().running:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it still runs")

    grammar_made = grammar(engine, "regex", "[0-9]{500}")
    asyncio.run(leave())
