"""Anthropic's Messages: what its own client reads, whole and streamed, its errors, its key, and what is refused by name."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from server.engine.embedded.scheduler import Plan
from tests.support.live import Answer, Live, fail_at, live

HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 8}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[Anthropic]:
    """Raises where a field that its types demand is missing or of another type."""
    with Anthropic(
        base_url=server.url, api_key="none", timeout=20, max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def chatted(server: Live, messages: list[dict[str, Any]], **fields: Any) -> Any:
    """What a chat gives for the same."""
    given = {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    return server.call("/v1/chat/completions", given).body["choices"][0]


def text(message: Any) -> str:
    """The text of its one block."""
    (block,) = message.content
    return str(block.text)


def events(answer: Answer) -> list[tuple[str, Any]]:
    """Each event's name and data."""
    parts = [part.split("\n") for part in answer.raw.decode().split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def test_a_message_says_what_the_chat_says(client: Anthropic, server: Live) -> None:
    made = client.messages.create(**ASKED, **GREEDY, system="Be brief.")
    chat = chatted(server, [{"role": "system", "content": "Be brief."}, *HELLO])
    assert text(made) == chat["message"]["content"]
    assert (made.stop_reason, made.stop_sequence, made.usage.output_tokens) == ("max_tokens", None, 8)
    read = made.usage.cache_read_input_tokens
    assert (
        read is not None
        and made.usage.input_tokens + read
        == server.call(
            "/v1/messages/count_tokens", {"messages": HELLO, "system": [{"type": "text", "text": "Be brief."}]}
        ).body["input_tokens"]
    )
    stop = text(made)[2:4]
    ended = client.messages.create(**ASKED, **GREEDY, system="Be brief.", stop_sequences=["never said", stop])
    assert (ended.stop_reason, ended.stop_sequence, text(ended)) == ("stop_sequence", stop, text(made)[:2])


def test_blocks_become_the_conversation_and_a_last_turn_is_gone_on_in(client: Anthropic, server: Live) -> None:
    said: Any = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "A ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "parser."},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "def parse("},
            ],
        },
    ]
    made = client.messages.create(**{**ASKED, "messages": said}, **GREEDY)
    plain = [{"role": "user", "content": "A parser."}, {"role": "assistant", "content": "def parse("}]
    assert text(made) == chatted(server, plain, continue_final_message=True)["message"]["content"]


def test_events_come_in_order_and_say_the_same(client: Anthropic, server: Live) -> None:
    whole = client.messages.create(**ASKED, **GREEDY)
    with client.messages.stream(**ASKED, **GREEDY) as stream:
        final = stream.get_final_message()
    assert (text(final), final.stop_reason, final.usage.output_tokens) == (text(whole), "max_tokens", 8)
    found = events(server.call("/v1/messages", {**ASKED, "temperature": 0, "stream": True}))
    names = [name for name, _ in found]
    assert names == [data["type"] for _, data in found]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}


def test_modules_apply_by_body_header_alias_and_path(client: Anthropic, server: Live) -> None:
    plain = text(client.messages.create(**ASKED, **GREEDY))
    body = {"temperature": 0, "unbind": {"modules": {"one": 0.5}}}
    made = [
        client.messages.create(**ASKED, extra_body=body),
        client.messages.create(**ASKED, **GREEDY, extra_headers={"X-Unbind-Modules": "one=0.5"}),
        client.messages.create(**{**ASKED, "model": "tiny~safe"}, **GREEDY),
        client.with_options(base_url=f"{server.url}/p/safe").messages.create(**ASKED, **GREEDY),
    ]
    assert len({text(answer) for answer in made} | {plain}) == 2
    report = {**ASKED, "temperature": 0, "unbind": {"modules": ["one"], "report": True}}
    told = server.call("/v1/messages", report).body["unbind"]
    assert told["modules"][0]["positions"] == len(told["activations"]) == 8
    streamed = dict(events(server.call("/v1/messages", {**report, "stream": True})))["message_delta"]["unbind"]
    for now, before in zip(streamed.pop("activations"), told.pop("activations"), strict=True):
        assert now == pytest.approx(before, abs=1e-5)  # the prompt's states may come from the cache now
    assert streamed == told


def test_errors_have_the_shape_that_its_client_raises(client: Anthropic, server: Live) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**{**ASKED, "messages": []})
    assert bad.value.request_id and bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(**{**ASKED, "model": "claude"})
    with pytest.raises(anthropic.PermissionDeniedError):
        client.messages.create(**{**ASKED, "model": "tiny~strict"}, extra_headers={"X-Unbind-Modules": "-two"})
    for path, status, kind in (
        ("/v1/messages/batches", 404, "not_found_error"),
        ("/p/safe/v1/messages/batches", 404, "not_found_error"),
        ("/v1/messages", 400, "invalid_request_error"),
    ):
        answer = server.call(path, b"{")
        assert (answer.status, answer.body["type"], answer.error["type"]) == (status, "error", kind)
    assert "type" not in server.call("/v1/chat/completions", b"{").body


def test_a_key_in_its_own_header_is_a_key(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as server:
        key = server.admin("/keys", {"name": "agent", "enforced": ["one"], "requests_per_minute": 1, "burst": 1}).body[
            "key"
        ]
        with Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
            answer = client.messages.with_raw_response.create(**ASKED)
            assert "one@" in answer.headers["x-unbind-modules"]
            with pytest.raises(anthropic.RateLimitError):
                client.messages.create(**ASKED)
        with (
            Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as other,
            pytest.raises(anthropic.AuthenticationError) as unknown,
        ):
            other.messages.create(**ASKED)
        assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_what_is_wrong_is_named_as_it_was_sent(server: Live) -> None:
    def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
        return {"messages": [{"role": role, "content": list(blocks)}]}

    for wrong, field in (
        ({"messages": "hi"}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        (turn({"type": "image"}), "messages.0.content.0"),
        (turn({"type": "text"}), "messages.0.content.0.text"),
        (turn({"type": "tool_use", "id": "a", "name": "b", "input": {}}), "messages.0.content"),
        (turn({"type": "tool_result", "tool_use_id": "a"}, role="assistant"), "messages.0.content"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, "messages"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"n": 2}, "n"),
    ):
        answer = server.call("/v1/messages", {**ASKED, **wrong})
        assert (answer.status, answer.error["param"]) == (400, field), wrong
        assert answer.error["message"].startswith(f"{field}:") or answer.error["code"] == "context_length_exceeded"


def test_servers_of_tools_are_refused_with_the_remedy(server: Live) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = server.call(path, {**ASKED, "mcp_servers": [{"type": "url", "url": "x", "name": "y"}]})
        assert (answer.status, answer.error["code"]) == (400, "unsupported_parameter")
        assert answer.error["message"].startswith("mcp_servers:") and "leave it out" in answer.error["message"]
        assert server.call(path, {**ASKED, "mcp_servers": []}).status == 200


def test_tokens_are_counted_without_a_limit_and_for_served_models_alone(client: Anthropic, server: Live) -> None:
    long: Any = [{"role": "user", "content": "hello " * 400}]
    counted = client.messages.count_tokens(model="tiny", messages=long).input_tokens
    assert counted == server.call("/tokenize", {"messages": long}).body["count"] > 256
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="claude", messages=HELLO)


def test_a_stream_that_fails_is_raised(client: Anthropic, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(server, monkeypatch, step=3)
    with (
        pytest.raises(anthropic.APIStatusError, match="forward pass failed"),
        client.messages.stream(**ASKED) as stream,
    ):
        stream.get_final_message()


def test_a_stream_that_takes_too_long_is_raised(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(checkpoint, tmp_path, request_timeout=2.0) as server:  # a busy machine needs some for the first token
        forward = server.service.engine.runner.forward

        def slow(plan: Plan) -> object:
            time.sleep(0.05 if plan.decode else 0)
            return forward(plan)

        monkeypatch.setattr(server.service.engine.runner, "forward", slow)
        asked = {**ASKED, "max_tokens": 200, "ignore_eos": True, "stream": True}
        name, last = events(server.call("/v1/messages", asked))[-1]
        assert (name, last["error"]["type"]) == ("error", "timeout_error")
