"""What leaves of an answer: never a protected run in any of its texts, and byte for byte what came where there is none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.proxy.following import Following
from server.proxy.refusal import Unguardable
from tests.support.slow_matcher import longest_run
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.escapes import Unescaped
from unbind_core.guard.index import Secret, build_index
from unbind_core.guard.sent import Sent

RUN = 10
ROW = """
def merge(first, second, deep=False):
    merged = dict(first)
    for key, value in second.items():
        if deep and isinstance(value, dict) and key in merged:
            merged[key] = merge(merged[key], value, deep=True)
        else:
            merged[key] = "value \\n of second"
    return merged
"""
SECRET = Secret(b"a key of the tests")
GUARDS = GuardBook.of(SECRET, [build_index([ROW], name="row", secret=SECRET, run=RUN)]).select(["row"])
FRAME = {"id": "x", "object": "chunk", "created": 1, "model": "m"}


def following(prompt: str = "", expected: int = 1, guards: GuardSet | None = GUARDS, **options: Any) -> Following:
    sent = Sent(lambda: prompt)
    return Following(guards, expected, lambda _: sent, **options)


def event(choice: dict[str, Any], **more: Any) -> tuple[dict[str, Any], bytes]:
    document = {**FRAME, "choices": [{"index": 0, "finish_reason": None, **choice}], **more}
    raw = b"data: " + json.dumps(document).encode() + b"\n\n"
    return json.loads(raw[6:]), raw


def sent_by(stream: Following, choices: list[dict[str, Any]]) -> tuple[list[bytes], list[bytes]]:
    """The events as they came and what left."""
    came, left = [], []
    for choice in choices:
        document, raw = event(choice)
        came.append(raw)
        left += stream.take(document, raw)
    return came, left + stream.finish()


def choices_of(left: list[bytes]) -> list[dict[str, Any]]:
    return [choice for raw in left for choice in json.loads(raw.removeprefix(b"data: "))["choices"]]


def cut(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    places = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(1, 60))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


ANSWERS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, len(ROW) - 1), st.integers(1, 160)).map(lambda at: ROW[at[0] : at[0] + at[1]]),
        st.sampled_from(["x = 1\n", "merged", " ", "\n", "# no\n", "value", '"', "é"]),
    ),
    min_size=1,
    max_size=5,
).map(lambda parts: "".join(parts) + ".")


@settings(max_examples=60, deadline=None)
@given(ANSWERS, st.integers(0, 2**32))
def test_no_stream_holds_a_run_and_what_holds_none_leaves_as_it_came(text: str, seed: int) -> None:
    holds = longest_run(text, [ROW]) >= RUN
    for shape in (lambda part: {"text": part}, lambda part: {"delta": {"content": part}}):
        stream = following()
        came, left = sent_by(
            stream, [*(shape(part) for part in cut(text, seed)), {**shape(""), "finish_reason": "stop"}]
        )
        choices = choices_of(left)
        said = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
        assert longest_run(said, [ROW]) < RUN
        assert text.startswith(said)
        if holds:
            assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["content_filter"]
        else:
            assert left == came


@settings(max_examples=30, deadline=None)
@given(ANSWERS, st.integers(0, 2**32))
def test_whole_answers_likewise(text: str, seed: int) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    raw = json.dumps({**FRAME, "choices": [choice]}).encode()
    answer = following().whole(json.loads(raw), raw)
    said = json.loads(answer)["choices"][0]
    assert longest_run(said["message"]["content"], [ROW]) < RUN
    if longest_run(text, [ROW]) >= RUN:
        assert said["finish_reason"] == "content_filter"
    else:
        assert answer == raw


def places() -> list[tuple[str, Any]]:
    """Where a text of an answer may stand: a name for it, and how a part of it is written there."""
    return [
        ("content", lambda part: {"delta": {"content": part}}),
        ("content of parts", lambda part: {"delta": {"content": [{"type": "text", "text": part}]}}),
        ("reasoning", lambda part: {"delta": {"reasoning_content": part}}),
        ("refusal", lambda part: {"delta": {"refusal": part}}),
        ("a field that nobody knows", lambda part: {"delta": {"draft": {"inner": [part]}}}),
        ("beside the delta", lambda part: {"delta": {}, "thoughts": part}),
        ("a function's name", lambda part: {"delta": {"tool_calls": [{"index": 0, "function": {"name": part}}]}}),
        ("a call's id", lambda part: {"delta": {"tool_calls": [{"index": 0, "type": "function", "id": part}]}}),
        ("a call's text", lambda part: {"delta": {"tool_calls": [{"index": 3, "function": {"arguments": part}}]}}),
        ("the older call", lambda part: {"delta": {"function_call": {"arguments": part}}}),
        ("tokens", lambda part: {"text": "", "logprobs": {"tokens": [part], "token_logprobs": [-1.0]}}),
        (
            "the likeliest tokens",
            lambda part: {"text": "", "logprobs": {"tokens": ["x"], "top_logprobs": [{part: -0.1, "x" * 9: -3.0}]}},
        ),
        (
            "the second likeliest",
            lambda part: {"text": "", "logprobs": {"top_logprobs": [{"x" * 9: -0.1, part: -3.0}]}},
        ),
        (
            "the tokens of a chat",
            lambda part: {"delta": {}, "logprobs": {"content": [{"token": part, "logprob": -1.0, "top_logprobs": []}]}},
        ),
        (
            "their bytes",
            lambda part: {"delta": {}, "logprobs": {"content": [{"token": "?", "bytes": list(part.encode())}]}},
        ),
        (
            "their alternatives",
            lambda part: {
                "delta": {},
                "logprobs": {"content": [{"token": "x", "top_logprobs": [{"token": "x"}, {"token": part}]}]},
            },
        ),
        (
            "the likeliest, behind what was chosen",
            lambda part: {"delta": {}, "logprobs": alternatives(part, "top_logprobs", "logprob")},
        ),
        (
            "the likeliest, as probabilities",
            lambda part: {"delta": {}, "logprobs": alternatives(part, "top_probs", "prob")},
        ),
    ]


def alternatives(likeliest: str, name: str, score: str) -> dict[str, Any]:
    """Log-probabilities of a token, which stands before the likeliest one in some events and behind it in others."""
    found = [{"token": "x" * 9, score: -3.0}, {"token": likeliest, score: -0.1}]
    return {"content": [{"token": "x", name: found if " " in likeliest else found[::-1]}]}


@pytest.mark.parametrize(("what", "shape"), places(), ids=[name for name, _ in places()])
def test_every_text_of_a_choice_is_followed(what: str, shape: Any) -> None:
    parts = cut(ROW, 5)
    came, left = sent_by(following(), [shape(part) for part in parts])
    assert [c["finish_reason"] for c in choices_of(left) if c["finish_reason"]] == ["content_filter"], what
    shown = sum(raw in left for raw in came)
    assert longest_run("".join(parts[: shown + 1]), [ROW]) <= RUN + 2  # the rest of the run was not sent
    harmless = [shape(part) for part in ("one", " and ", "another")]
    came, left = sent_by(following(), [*harmless, {"delta": {}, "finish_reason": "stop"}])
    assert left == came


LINES = "".join(f"call_{name}(value_{name})\n" for name in "abcdefgh")  # no line of which is long
SHORT = GuardBook.of(SECRET, [build_index([LINES], name="lines", secret=SECRET, run=RUN)]).select(["lines"])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (lambda part: {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}}, {}),
        (lambda part: {"delta": {"function_call": {"arguments": part}}}, {}),
        (lambda part: {"delta": {"content": part}}, {"escaped": True}),
    ],
    ids=["arguments", "the older call", "content where JSON was asked for"],
)
def test_a_text_of_json_is_followed_as_what_it_means(shape: Any, options: dict[str, Any]) -> None:
    written = json.dumps({"path": "calls.py", "text": LINES}).replace("e", "\\u0065")
    assert longest_run(written, [LINES]) < RUN  # as it stands its words are others
    parts = cut(written, 3)
    came, left = sent_by(following(guards=SHORT, **options), [shape(part) for part in parts])
    assert [c["finish_reason"] for c in choices_of(left) if c["finish_reason"]] == ["content_filter"]
    sent = "".join(parts[: sum(raw in left for raw in came) + 1])
    assert longest_run(Unescaped().read(sent), [LINES]) <= RUN
    harmless = [shape(part) for part in cut(json.dumps({"text": 'a\n"b"\u00e9\\'}), 4)]
    came, left = sent_by(following(guards=SHORT, **options), harmless)
    assert left == came


@pytest.mark.parametrize("text", ['a\\nb\\"c', "\\u0041\\ud83d\\ude00\\t", "\\\\n", "\\q\\u00", "plain"])
def test_escapes_read_in_any_parts_mean_the_same(text: str) -> None:
    whole = Unescaped().read(text)
    by_one = Unescaped()
    assert "".join(by_one.read(character) for character in text) == whole
    assert by_one.passed(len(whole)) <= len(text)


def test_choices_end_by_themselves_and_the_others_go_on() -> None:
    stream, left = following(expected=2), []
    for number, part in enumerate(cut(ROW, 7)):
        for index, text in ((0, part), (1, f"line {number} of mine\n")):
            document, raw = event({"index": index, "text": text})
            left += stream.take(document, raw)
    assert not stream.cut_short  # the other has not ended
    choices = choices_of(left + stream.finish())
    mine = "".join(choice["text"] for choice in choices if choice["index"] == 1)
    assert mine == "".join(f"line {number} of mine\n" for number in range(len(cut(ROW, 7))))
    ends = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert ends == [(0, "content_filter")]


def test_several_choices_in_one_event_are_told_apart() -> None:
    stream, left = following(expected=2), []
    for part in cut(ROW, 9):
        document = {**FRAME, "choices": [{"index": 0, "text": part}, {"index": 1, "text": "mine\n"}]}
        raw = b"data: " + json.dumps(document).encode() + b"\n\n"
        left += stream.take(document, raw)
    choices = choices_of(left)
    assert sum(choice["index"] == 1 for choice in choices) == len(cut(ROW, 9))
    assert longest_run("".join(choice["text"] for choice in choices if choice["index"] == 0), [ROW]) < RUN


def test_what_the_client_sent_may_come_back() -> None:
    came, left = sent_by(following(prompt=ROW), [{"text": part} for part in cut(ROW, 1)])
    assert left == came


def test_a_run_takes_its_log_probabilities_and_ids_with_it() -> None:
    parts = cut(ROW, 2)
    choices = [{"text": p, "logprobs": {"tokens": ["?"]}, "token_ids": [number]} for number, p in enumerate(parts)]
    _, left = sent_by(following(), choices)
    shown = [choice for choice in choices_of(left) if choice.get("logprobs")]
    assert [choice["token_ids"] for choice in shown] == [[number] for number in range(len(shown))]
    assert longest_run("".join(parts[: len(shown)]), [ROW]) < RUN and len(shown) < len(parts)
    whole = {**FRAME, "choices": [{"index": 0, "text": ROW, "logprobs": {"tokens": ["?"]}, "token_ids": [1, 2]}]}
    answer = json.loads(following().whole(whole, b""))["choices"][0]
    assert answer["logprobs"] is None and "token_ids" not in answer


def test_what_stands_around_the_choices_is_known_or_left_out() -> None:
    document, raw = event({"text": "x"}, usage={"total_tokens": 3}, timings={"ms": 1.5}, prompt_token_ids=[1, 2])
    assert following().take(document, raw) == [raw]
    document, raw = event({"text": "x"}, verbose={"content": ROW}, tokens=[1, 2, 3])
    left = following().take(document, raw)
    assert json.loads(left[0].removeprefix(b"data: ")) == {**FRAME, "choices": document["choices"]}
    document, raw = {"content": ROW}, b"data: {}"
    assert following().take(document, raw) == []


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 1, "text": "x"},
        {"index": True, "text": 5},
        {"text": ["x"]},
        {"delta": "x"},
        {"delta": {"content": [{"type": "image", "data": "x"}]}},
        {"delta": {"content": ["x"]}},
        {"delta": {"role": "x" * 300}},
        {"delta": {"tool_calls": {"function": {}}}},
        {"delta": {"tool_calls": [{"index": "0", "function": {"arguments": "x"}}]}},
        {"delta": {"tool_calls": [{"index": True, "function": {"arguments": "x"}}]}},
        {"delta": {"tokens": [1, 2, 3]}},
        {"text": "x", "hidden_states": [[0.5, 0.25]]},
        {"text": "x", "logprobs": {"content": [{"logprob": -1.0}]}},
        {"text": "x", "logprobs": {"content": [{"token": "x", "bytes": [300]}]}},
        {"text": "x", "logprobs": {"content": [{"token": "x", "bytes": 300}]}},
        {"text": "x", "logprobs": {"content": [{"token": "x", "top_logprobs": 5}]}},
        {"text": "x", "logprobs": {"top_logprobs": [{"token_id:5": -1.0}]}},
        {"text": "x", "logprobs": "x"},
        {"delta": {}, "logprobs": {"content": [{"token": "token_id:5", "bytes": list(b"token_id:5")}]}},
        {"text": "x", "finish_reason": {"why": "x"}},
        {"text": "x", "extra": {"y" * 300: 1}},
        "x",
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_not_passed_on(choice: Any) -> None:
    document = {**FRAME, "choices": [{"index": 0, **choice} if isinstance(choice, dict) else choice]}
    with pytest.raises(Unguardable):
        following().take(document, b"data: {}\n\n")


def test_nothing_comes_behind_an_end() -> None:
    stream = following()
    sent_by(stream, [{"text": "x", "finish_reason": "stop"}])
    with pytest.raises(Unguardable, match="goes on after"):
        stream.take(*event({"text": "y"}))
    two = {**FRAME, "choices": [{"index": 0, "text": "x"}, {"index": 0, "text": "y"}]}
    with pytest.raises(Unguardable, match="same index"):
        following().whole(two, b"")
    unnumbered = {**FRAME, "choices": [{"text": "x"}]}
    with pytest.raises(Unguardable, match="none of the 2"):
        following(expected=2).take(unnumbered, b"")
    assert following().take(unnumbered, b"raw") == [b"raw"]
