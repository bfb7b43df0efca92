"""Calls of tools and answers of a given form as responses and messages have them: what a chat says, under other names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.support.live import TOOL_TEMPLATE, Live, live

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
DESCRIBED: Any = {"name": "weather", "description": "Tells the weather."}
HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT_TOOLS: Any = [{"type": "function", "function": {**DESCRIBED, "parameters": SCHEMA}}]
TOOLS: Any = [{"type": "function", "parameters": SCHEMA, "strict": True, **DESCRIBED}]
THEIR_TOOLS: Any = [{"input_schema": SCHEMA, **DESCRIBED}]
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": "hello",
    "max_output_tokens": 80,
    "temperature": 0,
    "tools": TOOLS,
}
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "messages": HELLO,
    "max_tokens": 80,
    "tools": THEIR_TOOLS,
    "extra_body": {"temperature": 0},
}


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model whose template takes tools."""
    with live(checkpoint, tmp_path_factory.mktemp("agents"), template=TOOL_TEMPLATE, max_model_len=512) as running:
        yield running


@pytest.fixture(scope="module")
def openai(server: Live) -> Iterator[OpenAI]:
    """Strict about types."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


@pytest.fixture(scope="module")
def anthropic(server: Live) -> Iterator[Anthropic]:
    """Strict about types."""
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


def test_a_call_that_is_demanded_comes_as_an_item(openai: OpenAI) -> None:
    for choice in ("required", {"type": "function", "name": "weather"}):
        made: Any = openai.responses.create(**RESPONSE, tool_choice=choice, parallel_tool_calls=False)
        (call,) = made.output
        assert (call.type, call.name, call.status, made.status) == (
            "function_call",
            "weather",
            "completed",
            "completed",
        )
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome") and call.call_id


def test_a_call_streams_as_its_arguments(openai: OpenAI) -> None:
    asked: dict[str, Any] = {**RESPONSE, "tool_choice": "required", "parallel_tool_calls": False}
    whole: Any = openai.responses.create(**asked).output[0]
    with openai.responses.create(**asked, stream=True) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2] == "output_item.added" and events[2].item.name == "weather" and events[2].item.arguments == ""
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert "".join(event.delta for event in events[3:-3]) == events[-3].arguments == whole.arguments
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with openai.responses.stream(**asked) as stream:
        final: Any = stream.get_final_response().output[0]
    assert final.arguments == whole.arguments and final.name == "weather"


def test_a_call_comes_as_a_block_with_its_input(anthropic: Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        asked: dict[str, Any] = {**MESSAGE, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        made: Any = anthropic.messages.create(**asked)
        (block,) = made.content
        assert (block.type, block.name, made.stop_reason) == ("tool_use", "weather", "tool_use")
        assert block.input["city"] in ("Paris", "Rome")
        with anthropic.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed: Any = stream.get_final_message()
        assert (streamed.content[0].input, streamed.stop_reason) == (block.input, "tool_use")
        assert "input_json" in kinds


def test_what_tools_said_is_in_the_prompt_as_in_a_chat(openai: OpenAI, anthropic: Anthropic, server: Live) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    conversation = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sun."},
        *HELLO,
    ]
    chat = server.call(
        "/v1/chat/completions", {"messages": conversation, "max_tokens": 8, "temperature": 0, "tools": CHAT_TOOLS}
    ).body
    said = chat["choices"][0]["message"]["content"]
    items: Any = [
        *HELLO,
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "Sun."},
        *HELLO,
    ]
    tools: Any = [{"type": "function", "parameters": SCHEMA, **DESCRIBED}]
    assert (
        openai.responses.create(**{**RESPONSE, "input": items, "max_output_tokens": 8, "tools": tools}).output_text
        == said
    )
    turns: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Sun."}]},
                {"type": "text", "text": "hello"},
            ],
        },
    ]
    made: Any = anthropic.messages.create(**{**MESSAGE, "messages": turns, "max_tokens": 8})
    assert made.content[0].text == said
    usage = made.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert (
        anthropic.messages.count_tokens(model="tiny", messages=turns, tools=THEIR_TOOLS).input_tokens
        == chat["usage"]["prompt_tokens"]
    )


def test_answers_have_the_form_that_was_asked_for(openai: OpenAI, anthropic: Anthropic) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    made = openai.responses.create(**{**RESPONSE, "tools": [], "text": text})
    assert json.loads(made.output_text)["city"] in ("Paris", "Rome") and made.status == "completed"
    wanted: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message: Any = anthropic.messages.create(**{**MESSAGE, "tools": [], "output_config": wanted})
    assert json.loads(message.content[0].text)["city"] in ("Paris", "Rome")


def test_tools_that_a_server_would_carry_out_are_refused_as_what_is_not_built(server: Live) -> None:
    chat: Any = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (
        ("/v1/responses", {"input": "a", "tools": [*TOOLS, {"type": "web_search"}]}),
        ("/v1/chat/completions", {**chat, "tools": [*CHAT_TOOLS, {"type": "custom", "custom": {"name": "patch"}}]}),
        ("/v1/messages", {**chat, "max_tokens": 1, "tools": [*THEIR_TOOLS, {"type": "bash_20250124", "name": "bash"}]}),
    ):
        answer = server.call(path, body)
        assert answer.status == 400 and answer.error["param"] == "tools.1.type", answer.raw
        assert answer.error["code"] == "unsupported_parameter" and "leave this one out" in answer.error["message"]


def test_what_is_wrong_with_tools_is_named_as_it_was_sent(server: Live) -> None:
    hollow = {"type": "nonsense"}
    for path, wrong, field in (
        ("/v1/responses", {"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ("/v1/responses", {"tools": [*TOOLS, *TOOLS]}, "tools"),
        ("/v1/responses", {"tools": [], "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": hollow, "strict": True}}, "tools": []},
            "text.format.schema",
        ),
        ("/v1/messages", {"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ("/v1/messages", {"tools": [*THEIR_TOOLS, *THEIR_TOOLS]}, "tools"),
        ("/v1/messages", {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": hollow}}, "tools": []},
            "output_config.format.schema",
        ),
    ):
        base = (
            RESPONSE
            if path == "/v1/responses"
            else {name: value for name, value in MESSAGE.items() if name != "extra_body"}
        )
        answer = server.call(path, {**base, **wrong})
        assert (answer.status, answer.error["param"]) == (400, field), (path, wrong, answer.raw)


def test_a_call_that_was_cut_may_be_sent_back(openai: OpenAI) -> None:
    cut: Any = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Pa'}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "These arguments are cut."}
    made = openai.responses.create(**{**RESPONSE, "input": [*HELLO, cut, result], "max_output_tokens": 8})
    assert made.status in ("completed", "incomplete")


def test_a_limit_within_a_call_leaves_it_incomplete(openai: OpenAI, anthropic: Anthropic) -> None:
    made: Any = openai.responses.create(**{**RESPONSE, "tool_choice": "required", "max_output_tokens": 24})
    assert (made.status, made.output[-1].status) == ("incomplete", "incomplete")
    message: Any = anthropic.messages.create(**{**MESSAGE, "tool_choice": {"type": "any"}, "max_tokens": 24})
    assert message.stop_reason == "max_tokens"


def test_arguments_that_no_json_can_write_again_are_a_text(server: Live) -> None:
    """A number beyond any float is JSON, and the body of an answer could not hold what Python reads of it."""
    nine, exponent = (server.call("/tokenize", {"content": one}).body["tokens"][0] for one in "9e")
    size = {"type": "object", "properties": {"size": {"type": "number"}}, "required": ["size"]}
    asked = {
        "messages": HELLO,
        "max_tokens": 200,
        "temperature": 0,
        "tools": [{"name": "f", "input_schema": {**size, "additionalProperties": False}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "logit_bias": {str(nine): 40, str(exponent): 60},
        "frequency_penalty": 2,
    }
    answer = server.call("/v1/messages", asked)
    assert answer.status == 200, answer.raw
    (call,) = answer.body["content"]
    assert json.loads(call["input"]["arguments"])["size"] == float("inf")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_schema_with_a_number_that_is_none_in_json_is_refused(server: Live, number: float) -> None:
    """Tools and the form of a response stand in its answer again, which could not be written."""
    odd = {"type": "object", "properties": {"size": {"type": "number", "maximum": number}}}
    response = {"input": "hello", "max_output_tokens": 1}
    chat = {"messages": HELLO, "max_tokens": 1}
    form = {"type": "json_schema", "name": "a", "schema": odd}
    function = {"type": "function", "function": {"name": "a", "parameters": odd}}
    for path, body, field in (
        (
            "/v1/responses",
            {**response, "tools": [{"type": "function", "name": "a", "parameters": odd}]},
            "tools.0.parameters",
        ),
        ("/v1/responses", {**response, "text": {"format": form}}, "text.format.schema"),
        ("/v1/chat/completions", {**chat, "tools": [function]}, "tools.0.function.parameters"),
        ("/v1/chat/completions", {**chat, "guided_json": odd}, "guided_json"),
        ("/v1/messages", {**chat, "tools": [{"name": "a", "input_schema": odd}]}, "tools.0.input_schema"),
    ):
        answer = server.call(path, body)
        assert (answer.status, answer.error["param"]) == (400, field), answer.raw
        assert "none in JSON" in answer.error["message"]


def test_a_call_that_a_stop_string_ends_is_not_told_as_whole(server: Live) -> None:
    short = {"temperature": 0, "stop": ["Paris", "Rome"]}
    chat = {**short, "messages": HELLO, "max_tokens": 80, "tools": CHAT_TOOLS, "tool_choice": "required"}
    whole = server.call("/v1/chat/completions", chat).body["choices"][0]
    called = whole["message"]["tool_calls"][0]["function"]
    assert (whole["finish_reason"], called["arguments"]) == ("stop", '{"city": "')
    last = server.call("/v1/chat/completions", {**chat, "stream": True}).events[-2]["choices"][0]
    assert last["finish_reason"] == "stop"

    turn = {**short, "messages": HELLO, "max_tokens": 80, "tools": THEIR_TOOLS, "tool_choice": {"type": "any"}}
    message = server.call("/v1/messages", turn).body
    assert message["stop_reason"] == "stop_sequence" and message["stop_sequence"] in ("Paris", "Rome")

    asked = {**RESPONSE, **short, "tool_choice": "required"}
    made = server.call("/v1/responses", asked).body
    assert (made["status"], made["output"][-1]["status"]) == ("completed", "incomplete")


@pytest.mark.parametrize("name", ["get weather", "münze", "functions.weather:0", "x" * 300])
def test_a_call_of_a_function_that_there_is_not_may_be_sent_back(server: Live, name: str) -> None:
    """Whatever name a model writes is told as it stands, so a client that answers that there is no such function has it."""
    called = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
    used = {"type": "tool_use", "id": "c", "name": name, "input": {}}
    said = {"type": "tool_result", "tool_use_id": "c", "content": "none such"}
    item = {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "none such"}
    chat = [
        *HELLO,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "none such"},
    ]
    turns = [*HELLO, {"role": "assistant", "content": [used]}, {"role": "user", "content": [said]}]
    assert f'"name": "{name}"' in server.call("/apply-template", {"messages": chat}).body["prompt"]
    for path, body in (
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}),
        ("/v1/responses", {"input": [*HELLO, item, output], "max_output_tokens": 1}),
        ("/v1/messages", {"messages": turns, "max_tokens": 1}),
    ):
        answer = server.call(path, body)
        assert answer.status == 200, answer.raw
