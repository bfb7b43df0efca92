"""Calls are found in what a model writes, in each family's format, however the stream is cut, and nothing else is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest

from server.api.inference.tools.calling import Speech
from server.api.inference.tools.formats import FORMATS
from server.api.inference.tools.reading import Reader

Calls = list[tuple[str, str]]
TEXTS: dict[str, list[tuple[str, str, Calls]]] = {
    "hermes": [
        ('<tool_call>\n{"name": "f", "arguments": {"a": "}{\\"<b"}}\n</tool_call>', "", [("f", '{"a": "}{\\"<b"}')]),
        (
            'I look.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n{"arguments": {"x": [1, {"y": 2}]}, '
            '"name": "g"}\n</tool_call>',
            "I look.",
            [("f", "{}"), ("g", '{"x": [1, {"y": 2}]}')],
        ),
        ("a < b <tool_cal> <tool_call>no</tool_call> x", "a < b <tool_cal> <tool_call>no x", []),
        ('<tool_call>{"name": "f"}</tool_call> done', " done", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "\\ud83d"}</tool_call>', "", [("f", '"\\ud83d"')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
        ('<tool_call>{"na', '<tool_call>{"na', []),
        ("no calls here\n\n", "no calls here\n\n", []),
        ("  ", "  ", []),
        ("", "", []),
    ],
    "llama": [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (' \n<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": null}}',
            "",
            [("f", "{}"), ("g", '{"b": null}')],
        ),
        ('{"name": "Ann", "parameters": {"a": 1}} is', '{"name": "Ann", "parameters": {"a": 1}} is', []),
        ('{"b": [1, 2]}', '{"b": [1, 2]}', []),
        ('Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', []),
    ],
    "mistral": [
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
            "",
            [("f", '{"a": [1]}'), ("g", "{}")],
        ),
        ('Well.[TOOL_CALLS] [ {"name": "f", "arguments": {}} ]', "Well.", [("f", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": {}}', "", [("f", '{"a": 1}'), ("g", '{"b": {}}')]),
        ('[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ("see [1, 2]", "see [1, 2]", []),
    ],
    "deepseek": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n'
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (
            'Ok <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "｜"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "Ok",
            [("f", '{"a": "｜"}')],
        ),
        ("```json\n{}\n```", "```json\n{}\n```", []),
    ],
}
CASES = [(name, *case) for name, cases in TEXTS.items() for case in cases]


def said(
    name: str, parts: list[str], most: int | None = None, reason: str = "stop"
) -> tuple[str, Calls, list[list[str]]]:
    """Content, calls, and by call the arguments' pieces as deltas brought them; the whole message is that of the deltas."""
    speech = Speech(Reader(FORMATS[name], {"f", "g"}, most))
    content, calls, pieces = "", list[str](), list[list[str]]()
    for place, part in enumerate(parts):
        for delta in speech.deltas(part, reason if place == len(parts) - 1 else None):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(pieces):
                    assert call["id"] and call["type"] == "function" and not call["function"]["arguments"]
                    calls.append(call["function"]["name"])
                    pieces.append([])
                else:
                    assert call.keys() == {"index", "function"}
                    pieces[call["index"]].append(call["function"]["arguments"])
    message = speech.message
    assert (message["content"] or "") == content
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert told == [(name, "".join(text)) for name, text in zip(calls, pieces, strict=True)]
    return content, told, pieces


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found_wherever_a_stream_is_cut(name: str, text: str, content: str, calls: Calls) -> None:
    assert said(name, [text])[:2] == (content, calls)
    assert said(name, list(text) or [""])[:2] == (content, calls)
    places = range(len(text) + 1)
    for cuts in [(at,) for at in places] + [(a, b) for a in places[::3] for b in places[a::7]]:
        parts = [text[a:b] for a, b in pairwise((0, *cuts, len(text)))]
        assert said(name, parts)[:2] == (content, calls), parts


@pytest.mark.parametrize("name", TEXTS)
def test_behind_a_call_an_answer_that_is_cut_says_no_half_of_a_marker(name: str) -> None:
    for text, content, calls in [case for case in TEXTS[name] if len(case[2]) == 2]:
        ends = [end for end in range(len(text) + 1) if said(name, [text[:end]])[1][:1] == calls[:1]]
        assert len(ends) > 20
        for end in ends:
            for parts in ([text[:end]], [text[:end], ""], list(text[:end])):
                assert said(name, parts, reason="length")[0] == content, parts


def test_what_looks_like_half_of_a_marker_is_text_where_it_may_be() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for text, reason in [(" a <tool", "length"), (call + " a </tool", "length"), (call + "\n<tool", "stop")]:
        for parts in ([text], list(text)):
            assert said("hermes", parts, reason=reason)[0] == text.removeprefix(call)


def test_arguments_stream_as_they_come() -> None:
    _, _, pieces = said("hermes", list('<tool_call>{"name": "f", "arguments": {"a": 12}}</tool_call>'))
    assert pieces == [list('{"a": 12}')]


def test_calls_beyond_the_first_are_left_out_where_there_may_be_one() -> None:
    for name, cases in TEXTS.items():
        for text, content, calls in cases:
            assert said(name, list(text) or [""], most=1)[:2] == (content, calls[:1])


def test_mistral_gets_the_ids_that_its_templates_take() -> None:
    speech = Speech(Reader(FORMATS["mistral"], {"f"}), FORMATS["mistral"].id_length)
    speech.deltas('[TOOL_CALLS][{"name": "f", "arguments": {}}]', "stop")
    (call,) = speech.calls
    assert len(call["id"]) == 9 and call["id"].isalnum()


def test_a_call_ends_an_answer_as_one_where_the_model_ended_it() -> None:
    speech = Speech(Reader(FORMATS["llama"], {"f"}))
    assert speech.reason("stop") == "stop"
    speech.deltas('{"name": "f", "parameters": {}}', "stop")
    assert [speech.reason(reason) for reason in ("stop", "length", "content_filter")] == [
        "tool_calls",
        "length",
        "content_filter",
    ]


DEEP = "[" * 3000 + "]" * 3000  # more than the library reads


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f'{{"name": "f", "arguments": {DEEP}}}', [("f", DEEP)]),
        (f'{{"name": {DEEP}}}', []),
        (f"{{{DEEP}: 1}}", []),
    ],
)
def test_what_is_nested_too_deeply_ends_no_answer(text: str, calls: Calls) -> None:
    speech = Speech(Reader(FORMATS["hermes"], ["f"]))
    speech.deltas("<tool_call>" + text, "stop")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in speech.calls] == calls
    assert calls or speech.content == "<tool_call>" + text


@pytest.mark.parametrize(
    ("written", "most", "reason"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', None, "tool_calls"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', None, "stop"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "f", "argu', None, "stop"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "f", "argu', 1, "tool_calls"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"na', None, "tool_calls"),
    ],
)
def test_an_answer_that_ends_within_a_call_that_was_told_ends_with_no_calls(
    written: str, most: int | None, reason: str
) -> None:
    speech = Speech(Reader(FORMATS["hermes"], ("f",), most))
    speech.deltas(written, "stop")
    assert speech.reason("stop") == reason and speech.reason("length") == "length"
