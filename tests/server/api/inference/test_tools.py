"""Chats that call functions, over HTTP: templates of the four families, calls that are demanded, streams, the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from server.api.inference.tools.formats import FORMATS, format_of, shown_tokens
from server.engine.grammars import LONGEST
from server.settings import Settings
from tests.core.conftest import save_checkpoint
from tests.support.live import Live, live

_TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}\n{% endfor %}"
_TOLD = "{% if tools %}{{ tools[0].function.name }}: {{ tools[0].function.description }}\n{% endif %}"
_EACH = "{% for c in m.tool_calls %}"
_ALL = "{% endfor %}"
TEMPLATES = {
    "hermes": _TOLD
    + "<tool_call>"
    + _TURNS.replace(
        "CALLS",
        _EACH + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}",
    ),
    "llama": "Environment: ipython\n"
    + _TOLD
    + _TURNS.replace(
        "CALLS",
        _EACH + '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}' + _ALL,
    ),
    "mistral": _TOLD
    + _TURNS.replace(
        "CALLS",
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}"
        "[TOOL_CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}",
    ),
    "mistral-named": _TOLD
    + _TURNS.replace(
        "CALLS",
        "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
    ),
    "deepseek": _TOLD
    + _TURNS.replace(
        "CALLS",
        "<｜tool▁calls▁begin｜>" + _EACH + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
        "{{ c.function.arguments }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    ),
    "deepseek-named": _TOLD
    + _TURNS.replace(
        "CALLS",
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    ),
}
SPECIAL = {"mistral": "[TOOL_CALLS]", "deepseek": "<｜tool▁call▁begin｜>", "llama": "<|python_tag|>"}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/xy"}},
    "required": ["at"],
    "additionalProperties": False,
}
POINT["$defs"] = {"xy": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "draw", "parameters": POINT, "strict": True}},
    {"type": "function", "function": {"name": "stop_it"}},
]
SCHEMAS = {"weather": PLACE, "draw": POINT, "stop_it": {"type": "object", "maxProperties": 0}}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "go"}],
    "tools": TOOLS,
    "max_tokens": 230,
    "temperature": 1,
}


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Live]]:
    """A tiny model with the family's template; the first of two formats has its marker as a special token."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = save_checkpoint("qwen2", folder / "tiny")
    if marker := SPECIAL.get(request.param):
        for file in checkpoint.glob("*token*.json"):
            file.write_text(file.read_text().replace("<|fim_prefix|>", marker))
    with live(checkpoint, folder, (), template=TEMPLATES[request.param], max_model_len=400) as running:
        form = FORMATS[request.param]
        assert bool(shown_tokens(running.service.loaded.tokenizer, form)) == bool(marker)
        yield request.param, running


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for call in message["tool_calls"]:
        value = json.loads(call["function"]["arguments"])
        assert jsonschema_rs.is_valid(SCHEMAS[call["function"]["name"]], value), call
        found.append((call["function"]["name"], value))
    return found


def test_the_template_tells_the_format(family: tuple[str, Live]) -> None:
    name, server = family
    found = format_of(server.service.loaded.tokenizer.chat_template)
    assert found is not None and found.name == name
    assert format_of(server.service.loaded.tokenizer.chat_template, "none") is None


def test_the_template_shows_what_it_tells_of_functions(family: tuple[str, Live]) -> None:
    _, server = family
    asked = {"messages": ASK["messages"]}
    told = server.call("/apply-template", {**asked, "tools": TOOLS}).body["prompt"]
    tool = TOOLS[0]["function"]
    plain = server.call("/apply-template", asked).body["prompt"]
    assert f"{tool['name']}: {tool.get('description')}" in told and told.endswith(plain[-8:]) and len(told) > len(plain)
    assert server.call("/apply-template", {**asked, "tools": TOOLS, "tool_choice": "none"}).body["prompt"] == plain


def test_a_demanded_call_fits_its_schema_whole_and_streamed(family: tuple[str, Live]) -> None:
    _, server = family
    for seed in range(1):
        body = {**ASK, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed, "n": 2}
        answer = server.call("/v1/chat/completions", body)
        assert answer.status == 200, answer.raw
        for choice in answer.body["choices"]:
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            assert len(calls_of(choice["message"])) == 1
        events = server.call("/v1/chat/completions", {**body, "stream": True}).events
        assert not any(
            "content" in d and d["content"] is not None for d in (e["choices"][0]["delta"] for e in events[:-1])
        )
        streamed = joined(events, 2)
        assert [calls_of(one) for one in streamed] == [calls_of(c["message"]) for c in answer.body["choices"]]
        ends = [e["choices"][0]["finish_reason"] for e in events[:-1] if e["choices"][0]["finish_reason"]]
        assert ends == ["tool_calls", "tool_calls"]


def joined(events: list[Any], count: int) -> list[dict[str, Any]]:
    """The messages that the deltas of a stream make, as clients put them together."""
    found: list[dict[str, Any]] = [{"content": "", "tool_calls": []} for _ in range(count)]
    for event in events[:-1]:
        choice = event["choices"][0]
        message = found[choice["index"]]
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"id": call["id"], "type": call["type"], "function": dict(call["function"])}
                )
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return found


def test_a_named_function_is_called_and_no_other(family: tuple[str, Live]) -> None:
    _, server = family
    for name in ("draw",):
        chosen = {"type": "function", "function": {"name": name}}
        body = {**ASK, "tool_choice": chosen, "parallel_tool_calls": False}
        (choice,) = server.call("/v1/chat/completions", body).body["choices"]
        assert [called for called, _ in calls_of(choice["message"])] == [name]


def test_a_named_function_is_called_once(family: tuple[str, Live]) -> None:
    """As OpenAI has it, though several calls may follow another choice."""
    name, server = family
    named = {"type": "function", "function": {"name": "stop_it"}}
    bias = {
        str(server.call("/tokenize", {"content": text}).body["tokens"][0]): 20 for text in (";", ",", "\n", "<", "[")
    }
    body = {**ASK, "tool_choice": named, "logit_bias": bias, "max_tokens": 150, "seed": 1}
    (choice,) = server.call("/v1/chat/completions", body).body["choices"]
    assert choice["finish_reason"] == "tool_calls" and calls_of(choice["message"]) == [("stop_it", {})]
    free = {**body, "tools": TOOLS[2:], "tool_choice": "required"}
    (choice,) = server.call("/v1/chat/completions", free).body["choices"]
    assert len(choice["message"]["tool_calls"]) > 1 or name != "hermes"


def test_several_calls_may_be_demanded(family: tuple[str, Live]) -> None:
    name, server = family
    body = {**ASK, "tools": TOOLS[2:], "tool_choice": "required", "seed": 1, "max_tokens": 150}
    (choice,) = server.call("/v1/chat/completions", body).body["choices"]
    assert choice["finish_reason"] in ("tool_calls", "length")
    assert len(choice["message"]["tool_calls"]) == 1 or name != "llama"


def test_a_call_is_demanded_or_an_answer_of_a_form(family: tuple[str, Live]) -> None:
    """Where both may follow, either does, and nothing else."""
    _, server = family
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    for seed in range(3):
        body = {**ASK, "response_format": form, "parallel_tool_calls": False, "seed": seed}
        (choice,) = server.call("/v1/chat/completions", body).body["choices"]
        if choice["finish_reason"] == "tool_calls":
            assert calls_of(choice["message"])
        else:
            assert json.loads(choice["message"]["content"]) in (True, False)


def test_what_was_called_and_what_came_of_it_go_through_the_template(family: tuple[str, Live]) -> None:
    name, server = family
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "sun"},
    ]
    body = {"messages": messages, "tools": TOOLS[:1], "max_tokens": 1, "return_token_ids": True}
    answer = server.call("/v1/chat/completions", body)
    assert answer.status == 200, answer.raw
    text = server.call("/detokenize", {"tokens": answer.body["prompt_token_ids"]}).body["content"]
    before = FORMATS[name].call[0].split("NAME")[0].split("BARE")[0].split("{")[0]
    assert before in text and '{"city": "Ulm"}' in text and "<tool>sun" in text and "Of a city." in text
    none = server.call("/v1/chat/completions", {**body, "tool_choice": "none"})
    assert "Of a city" not in server.call("/detokenize", {"tokens": none.body["prompt_token_ids"]}).body["content"]


@pytest.mark.parametrize(
    "written", ['{"city": "Ul', "[1]", "Ulm", '{"city": "\\ud83d"}', '{"city": 1e999}', '{"city": NaN}']
)
def test_arguments_that_are_no_object_go_through_the_template_as_they_stand(
    family: tuple[str, Live], written: str
) -> None:
    _, server = family
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": written}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "wrong"}]
    answer = server.call("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True})
    assert answer.status == 200, answer.raw
    text = server.call("/detokenize", {"tokens": answer.body["prompt_token_ids"]}).body["content"]
    assert written in text or json.dumps(written) in text


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}, "tools": []}, "response_format.schema"),
    ({"response_format": {"type": "text", "schema": {"const": "a"}}}, "response_format.schema"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
]
_DEEP = json.loads('{"items":' * 400 + "{}" + "}" * 400)
_DEEP_TOOL = {"type": "function", "function": {"name": "a", "parameters": _DEEP}}
_LONG_TOOL = {"type": "function", "function": {"name": "a", "parameters": {"title": "x" * LONGEST, **_DEEP}}}
UNREADABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [_DEEP_TOOL], "tool_choice": "required"}, "tools", "is not understood"),
    ({"tools": [_LONG_TOOL], "tool_choice": "required"}, "tools", "characters"),
    ({"guided_json": "{"}, "guided_json", "is not understood"),
    ({"guided_json": "{" + " " * LONGEST}, "guided_json", "characters"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _DEEP}}},
        "response_format.json_schema.schema",
        "is not understood",
    ),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_does_not_go_is_named(hermes: Live, fields: dict[str, Any], param: str) -> None:
    refused = hermes.call("/v1/chat/completions", {**ASK, **fields})
    assert (refused.status, refused.error["param"]) == (400, param), refused.raw


@pytest.mark.parametrize(("fields", "param", "reason"), UNREADABLE)
def test_a_form_beside_functions_that_cannot_be_read_is_named(
    hermes: Live, fields: dict[str, Any], param: str, reason: str
) -> None:
    refused = hermes.call("/v1/chat/completions", {**ASK, **fields})
    assert (refused.status, refused.error["param"], refused.error["code"]) == (400, param, "invalid_grammar"), (
        refused.raw
    )
    assert reason in refused.error["message"]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("one")
    checkpoint = save_checkpoint("qwen2", folder / "tiny")
    with live(checkpoint, folder, (), template=TEMPLATES["hermes"], max_model_len=500) as running:
        yield running


def test_a_schema_beside_json_object_is_kept(hermes: Live) -> None:
    form = {"type": "json_object", "schema": {"enum": ["forty-two"]}}
    asked = {"messages": ASK["messages"], "max_tokens": 40, "temperature": 0, "response_format": form}
    for path in ("/v1/chat/completions", "/chat/completions"):
        assert hermes.call(path, asked).body["choices"][0]["message"]["content"] == '"forty-two"'


def test_an_empty_schema_beside_json_object_asks_for_an_object(hermes: Live) -> None:
    form = {"type": "json_object", "schema": {}}
    for seed in range(4):
        asked = {"messages": ASK["messages"], "max_tokens": 1, "seed": seed, "response_format": form}
        assert hermes.call("/v1/chat/completions", asked).body["choices"][0]["message"]["content"].startswith("{")


class Weather(BaseModel):
    """The weather."""

    city: str
    sunny: bool


def test_the_official_clients_helpers(hermes: Live) -> None:
    client = OpenAI(base_url=hermes.url + "/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "go"}]
    tool = pydantic_function_tool(Weather)
    biased = {str(hermes.service.loaded.tokenizer.convert_tokens_to_ids('"')): 30}
    said = client.chat.completions.parse(
        model="tiny", messages=messages, response_format=Weather, max_tokens=200, temperature=0, logit_bias=biased
    )
    assert isinstance(said.choices[0].message.parsed, Weather)
    called = client.chat.completions.parse(
        model="tiny",
        messages=messages,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
        logit_bias=biased,
    )
    assert called.choices[0].message.tool_calls is not None
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    with client.chat.completions.stream(
        model="tiny",
        messages=messages,
        tools=[tool],
        tool_choice="required",
        temperature=0,
        logit_bias=biased,
        max_tokens=200,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].finish_reason == "tool_calls"


def test_the_setting_names_every_format() -> None:
    options = Settings.model_json_schema()["properties"]["tool_format"]["enum"]
    assert options == ["", *FORMATS, "none"]


def test_a_format_can_be_set(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("qwen2", tmp_path / "tiny")
    template = _TOLD + _TURNS.replace("CALLS", "{{ m.tool_calls }}")
    with live(checkpoint, tmp_path, (), template=template, tool_format="llama", max_model_len=400) as server:
        body = {**ASK, "tool_choice": "required"}
        assert calls_of(server.call("/v1/chat/completions", body).body["choices"][0]["message"])
