"""What would change an answer and is not built is refused by name; what asks for nothing of it passes."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from server.api.inference.bodies.chat import ChatBody
from server.api.inference.bodies.unsupported import UNSUPPORTED
from tests.support.live import Live

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def a(", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    "/v1/fim/completions": {"prompt": "def a(", "suffix": "\n", "max_tokens": 1},
    "/infill": {"input_prefix": "def a(", "n_predict": 1},
    "/completion": {"prompt": "def a(", "n_predict": 1},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ASKED: list[tuple[str, Any]] = [
    ("tools", [TOOL]),
    ("guided_decoding_backend", "x"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("web_search_options", {}),
    ("structural_tag", "x"),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("use_beam_search", True),
    ("bad_words", ["x"]),
    ("mirostat", 2),
    ("typical_p", 0.5),
    ("skip_special_tokens", False),
    ("chat_template", "{{ messages }}"),
]
HARMLESS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "functions": None,
    "function_call": "none",
    "parallel_tool_calls": False,
    "response_format": {"type": "text"},
    "grammar": "",
    "json_schema": None,
    "structured_outputs": None,
    "guided_json": None,
    "guided_choice": [],
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "web_search_options": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "mirostat": 0,
    "typical_p": 1.0,
    "skip_special_tokens": True,
    "user": "me",
    "metadata": {"a": "b"},
    "reasoning_effort": "low",
    "store": True,
    "samplers": ["top_k"],
    "id_slot": 0,
}


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_would_change_the_answer_is_refused_by_name(server: Live, path: str) -> None:
    for name, value in ASKED:
        refused = server.call(path, {**BODIES[path], name: value})
        assert refused.status == 400, (name, value, refused.raw)
        assert (refused.error["code"], refused.error["param"]) == ("unsupported_parameter", name)
        assert refused.error["message"].startswith(f"{name}: ") and "leave it out" in refused.error["message"]
        assert refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", BODIES)
def test_values_that_ask_for_nothing_pass(server: Live, path: str) -> None:
    answer = server.call(path, {**BODIES[path], **HARMLESS})
    assert answer.status == 200, answer.raw


def test_what_one_route_has_another_refuses(server: Live) -> None:
    for name, value in (("echo", True), ("suffix", "x"), ("n_probs", 3), ("repeat_penalty", 1.5), ("grammar", "x")):
        refused = server.call("/v1/chat/completions", {**BODIES["/v1/chat/completions"], name: value})
        assert (refused.error["code"], refused.error["param"]) == ("unsupported_parameter", name)
    assert server.complete(echo=True, suffix="x").status == 200
    assert server.call("/completion", {**BODIES["/completion"], "repeat_penalty": 1.5}).status == 200
    asked: list[tuple[str, Any]] = [
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("json_schema", {}),
        ("structured_outputs", {"regex": "a+"}),
        ("guided_json", {"a": 1}),
        ("guided_choice", ["a", "b"]),
    ]
    for name, value in asked:
        refused = server.call("/v1/fim/completions", {**BODIES["/v1/fim/completions"], name: value})
        assert (refused.error["code"], refused.error["param"]) == ("unsupported_parameter", name)


def test_every_refused_field_has_a_value_that_passes_everywhere(server: Live) -> None:
    for path, body in BODIES.items():
        nothing = {name: harmless[0] for name, harmless in UNSUPPORTED.items() if harmless and name not in body}
        nothing |= {"add_special_tokens": False} if "chat" in path else {}
        nothing.pop("logprobs") if path == "/v1/completions" else None
        answer = server.call(path, {**body, **nothing})
        assert answer.status == 200, (path, answer.raw)


def test_calls_in_a_conversation_are_refused_where_the_template_knows_none(server: Live) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    refused = server.call("/v1/chat/completions", {"messages": messages})
    assert (refused.status, refused.error["code"]) == (400, "unsupported_parameter")
    assert "chat template knows no calls" in refused.error["message"]
    assert refused.error["param"] == "messages.1.tool_calls"
    messages[1] = {"role": "assistant", "content": "hello", "tool_calls": [], "refusal": None}
    assert server.call("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ["a", "b"], "suffix": "c"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_named(server: Live, body: dict[str, Any], param: str) -> None:
    refused = server.call("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    assert (refused.status, refused.error["param"], refused.error["code"]) == (400, param, "invalid_value")
    assert refused.error["message"].startswith(f"{param}: ")


def test_the_description_says_which_answers_may_be_streams(server: Live) -> None:
    described = server.call("/openapi.json").body["paths"]

    def kinds(path: str, method: str = "post") -> set[str]:
        return set(described[path][method]["responses"]["200"]["content"])

    prompt, chat = {"prompt": "a", "max_tokens": 1}, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for path, body in (
        ("/v1/completions", prompt),
        ("/v1/fim/completions", prompt),
        ("/completion", prompt),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 1}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ):
        answered = [server.call(path, {**body, "stream": stream}).headers["content-type"] for stream in (False, True)]
        assert kinds(path) == {one.partition(";")[0] for one in answered}, path
    assert kinds("/metrics", "get") == {server.call("/metrics").headers["content-type"].partition(";")[0]}
    assert kinds("/admin/v1/jobs/{job_id}/events", "get") == {"text/event-stream"}


def test_clients_can_be_made_from_the_description(server: Live) -> None:
    described = server.call("/openapi.json").body
    assert not [name for name in described["components"]["schemas"] if "__" in name]  # of two things with one name
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    parameters = [parameter for operation in operations for parameter in operation.get("parameters", ())]
    assert {"x-unbind-modules", "if-match", "limit"} <= {parameter["name"] for parameter in parameters}
    for parameter in parameters:  # absent it may be, and not null; a header is one text
        assert parameter["schema"]["type"] in ("string", "integer", "boolean"), parameter
    fields = [field for one in described["components"]["schemas"].values() for field in one["properties"].values()]
    assert [field for field in fields if field.get("default") == 1]
    assert not [field for field in fields if "default" in field and ("anyOf" in field or "$ref" in field)]


def test_an_unknown_route_names_what_there_is(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    described = server.call("/openapi.json").body["paths"]

    def unwanted(app: FastAPI) -> None:
        raise AssertionError("the whole description takes a second, in which nobody else is answered")

    monkeypatch.setattr(FastAPI, "openapi", unwanted)
    for path in ("/v1/rerank", "/v1/embeddings", "/v1/messages/batches", "/p/safe/v1/audio"):
        answer = server.call(path, {"input": "x"})
        assert (answer.status, answer.error["code"]) == (404, "unknown_route")
        assert "/v1/chat/completions" in answer.error["message"] and "/v1/completions" in answer.error["message"]
        named = answer.error["message"].split("there are: ")[1].split(", ")
        assert named == [path for path in sorted(described) if not path.startswith("/admin/")]
        assert "admin" not in answer.error["message"] and answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("name", ["modules", "module", "Unbind", "unbind_modules", "unbind.modules", "extra_body"])
def test_a_field_that_may_name_modules_and_is_not_read_is_refused(server: Live, path: str, name: str) -> None:
    value: Any = {"unbind": {"modules": ["a"]}} if name == "extra_body" else ["a"]
    body = {"input": "hello"} if path == "/v1/responses" else BODIES.get(path, BODIES["/v1/chat/completions"])
    assert server.call(path, body).status == 200
    refused = server.call(path, {**body, name: value})
    assert refused.status == 400
    assert refused.error["param"] == ("extra_body.unbind" if name == "extra_body" else name)
    assert '"unbind": {"modules": ["NAME"]}' in refused.error["message"]


@pytest.mark.parametrize("carrier", ["extra_headers", "extra_query", "extra_body"])
@pytest.mark.parametrize("name", ["X-Unbind-Modules", "x-unbind-module", "unbind"])
def test_a_header_that_a_client_wrote_into_the_body_is_refused(server: Live, carrier: str, name: str) -> None:
    for path, body in BODIES.items():
        refused = server.call(path, {**body, carrier: {"X-Trace": "1", name: "a"}})
        assert (refused.status, refused.error["param"]) == (400, f"{carrier}.{name}")
        assert '"unbind": {"modules": ["NAME"]}' in refused.error["message"]


@pytest.mark.parametrize("name", ["X-Unbind-Module", "X_Unbind_Modules", "Unbind-Modules", "X-UNBIND-PROFILE"])
def test_a_header_that_is_nearly_called_as_the_one_for_modules_is_refused(server: Live, name: str) -> None:
    for path, body in BODIES.items():
        refused = server.call(path, body, headers={name: "a"})
        assert (refused.status, refused.error["param"]) == (400, name.lower())
        assert "write the header X-Unbind-Modules: NAME" in refused.error["message"]
        assert server.call(path, body, headers={name: " "}).status == 200


@pytest.mark.parametrize("name", ["modules", "Module", "unbind", "unbind_modules", "X-Unbind-Modules", "profile"])
def test_a_parameter_of_the_address_that_may_name_modules_is_refused(server: Live, name: str) -> None:
    for path, body in BODIES.items():
        refused = server.call(f"{path}?{name}=a", body)
        assert (refused.status, refused.error["param"]) == (400, name)
        assert "write the header X-Unbind-Modules: NAME" in refused.error["message"]
        assert server.call(f"{path}?{name}=", body).status == 200
        assert server.call(f"{path}?api-version=2024-06-01", body).status == 200


@pytest.mark.parametrize(
    "given",
    [
        {"modules": None},
        {"modules": []},
        {"extra_body": {"top_k": 3}},
        {"extra_body": "x"},
        {"extra_headers": {"X-Trace": "1", "X-Unbind-Modules": ""}},
    ],
)
def test_what_names_no_module_passes(server: Live, given: dict[str, Any]) -> None:
    for path, body in BODIES.items():
        assert server.call(path, {**body, **given}).status == 200


SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
NAMED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {**SAY, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", ""),
    ("/v1/responses", {"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice.type", ""),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 1025}, "stop", "1024"),
    ("/v1/completions", {"prompt": "a", "stop": ["x", 5]}, "stop.1", "string"),
    ("/v1/completions", {"prompt": "a", "stop": 5}, "stop", "string"),
    ("/v1/completions", {"prompt": "a", "unbind": {"modules": {"Str": "x"}}}, "unbind.modules.Str", "number"),
    ("/v1/completions", {"prompt": "a", "unbind": {"modules": {"str": "x"}}}, "unbind.modules.str", "number"),
    ("/v1/messages", {**SAY, "max_tokens": 1, "tool_choice": {"type": "tool"}}, "tool_choice.name", ""),
]


@pytest.mark.parametrize(("path", "body", "param", "reason"), NAMED)
def test_a_field_is_named_as_the_client_wrote_it(
    server: Live, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    """No class or kind of ours is part of its name, however many kinds it takes, and the reason is that of the kind meant."""
    refused = server.call(path, body)
    assert (refused.status, refused.error["param"]) == (400, param), refused.raw
    assert refused.error["message"].startswith(f"{param}: ") and reason in refused.error["message"]


def test_a_body_of_countless_fields_is_refused_before_each_is_looked_at(server: Live) -> None:
    answer = server.complete(**{f"field_{number}": 1 for number in range(1025)})
    assert (answer.status, answer.error["param"]) == (400, "body") and "1024 may be sent" in answer.error["message"]


def test_functions_beyond_the_bound_are_not_looked_at() -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(512)]
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": [*tools, *[{}] * 20]})
    assert [(error["type"], error["loc"]) for error in refused.value.errors()] == [("too_long", ("tools",))]
