"""OpenAI's Responses: what its own client reads, whole and streamed, the order of events, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.live import Live, fail_at

ASKED: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 8, "temperature": 0}
LOGPROBS: Any = ["message.output_text.logprobs"]
BEGINNING = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[OpenAI]:
    """Raises where a field that its types demand is missing or of another type."""
    with OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=20, max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def chatted(server: Live, messages: list[dict[str, Any]], **fields: Any) -> Any:
    """What a chat gives for the same."""
    given = {"messages": messages, "temperature": 0, "max_completion_tokens": 8, **fields}
    return server.call("/v1/chat/completions", given).body["choices"][0]


def refused(server: Live, **fields: Any) -> tuple[int, str]:
    """Status and field."""
    answer = server.call("/v1/responses", {**ASKED, **fields})
    return answer.status, answer.error["param"]


def test_a_response_says_what_the_chat_says(client: OpenAI, server: Live) -> None:
    made = client.responses.create(**ASKED, metadata={"a": "b"})
    chat = chatted(server, [{"role": "user", "content": "hello"}])
    assert made.output_text == chat["message"]["content"] and chat["finish_reason"] == "length"
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens" and made.metadata == {"a": "b"}
    assert made.usage is not None and made.usage.output_tokens == 8
    ended = client.responses.create(**{**ASKED, "extra_body": {"stop": [made.output_text[1:3]]}})
    assert (ended.status, ended.output_text, ended.incomplete_details) == ("completed", made.output_text[:1], None)


def test_times_are_whole_seconds_as_servers_between_demand(server: Live) -> None:
    said = chatted(server, [{"role": "user", "content": "hello"}])["message"]["content"]
    body = server.call("/v1/responses", {**ASKED, "stop": [said[1:3]]}).body
    assert body["status"] == "completed"
    assert isinstance(body["created_at"], int) and isinstance(body["completed_at"], int)


def test_an_input_is_counted_as_the_prompt_that_it_becomes(client: OpenAI, server: Live) -> None:
    tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    for more in ({}, {"instructions": "Be brief."}, {"tools": tools, "tool_choice": "none"}):
        made = client.responses.create(**ASKED, **more)  # type: ignore[call-overload]
        counted = client.responses.input_tokens.count(model="tiny", input="hello", **more)  # type: ignore[arg-type]
        assert made.usage is not None and counted.input_tokens == made.usage.input_tokens
        assert counted.object == "response.input_tokens"
    long = client.responses.input_tokens.count(input="a parser " * 400)
    assert long.input_tokens > 256  # more than a request may have
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="gpt-0", input="hello")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.input_tokens.count(input="hello", previous_response_id="resp_1")


def test_items_become_the_conversation(client: OpenAI, server: Live) -> None:
    said: Any = [
        {"role": "developer", "content": "Write code."},
        {"role": "user", "content": [{"type": "input_text", "text": "A "}, {"type": "input_text", "text": "parser."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Which?", "annotations": []}],
        },
        {"role": "user", "content": "JSON."},
    ]
    made = client.responses.create(**{**ASKED, "input": said, "instructions": "Be brief."})
    messages = [
        {"role": "system", "content": "Be brief.\n\nWrite code."},  # templates take one message of the system
        {"role": "user", "content": "A parser."},
        {"role": "assistant", "content": "Which?"},
        {"role": "user", "content": "JSON."},
    ]
    assert made.output_text == chatted(server, messages)["message"]["content"]


def test_events_come_in_order_and_say_the_same(client: OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    with client.responses.create(**ASKED, stream=True) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == BEGINNING and kinds[-4:] == [*END, "response.incomplete"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-4].text
    assert events[-1].response.output_text == whole.output_text and events[-1].response.usage == whole.usage
    assert len({event.item_id for event in events[3:-2]} | {events[2].item.id, events[-2].item.id}) == 1
    assert events[0].response.usage is None and events[0].response.status == "in_progress"


def test_the_clients_stream_gathers_a_response(client: OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    stop = {"stop": [whole.output_text[2:4]]}
    with client.responses.stream(**ASKED, extra_body=stop) as stream:
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == whole.output_text[:2]


def test_scores_come_where_include_asks_for_them(client: OpenAI, server: Live) -> None:
    scored: dict[str, Any] = {"include": LOGPROBS, "top_logprobs": 2}
    whole: Any = client.responses.create(**ASKED, **scored).output[0]
    chat = chatted(server, [{"role": "user", "content": "hello"}], logprobs=True, top_logprobs=2)["logprobs"]["content"]
    scores = pytest.approx([entry["logprob"] for entry in chat], abs=1e-4)
    assert [entry.logprob for entry in whole.content[0].logprobs] == scores
    assert all(len(entry.top_logprobs) == 2 for entry in whole.content[0].logprobs)
    with client.responses.create(**ASKED, **scored, stream=True) as stream:
        parts = [event.logprobs for event in stream if event.type == "response.output_text.delta"]
    assert [entry.logprob for part in parts for entry in part] == scores
    plain: Any = client.responses.create(**ASKED).output[0]
    assert plain.content[0].logprobs == []
    assert refused(server, top_logprobs=2) == (400, "top_logprobs")


def test_modules_apply_by_body_header_alias_and_path(client: OpenAI, server: Live) -> None:
    plain = client.responses.create(**ASKED).output_text
    made = [
        client.responses.create(**ASKED, extra_body={"unbind": {"modules": {"one": 0.5}}}),
        client.responses.create(**ASKED, extra_headers={"X-Unbind-Modules": "one=0.5"}),
        client.responses.create(**{**ASKED, "model": "tiny~safe"}),
        client.with_options(base_url=f"{server.url}/p/safe/v1").responses.create(**ASKED),
    ]
    assert len({answer.output_text for answer in made} | {plain}) == 2
    report: Any = {"unbind": {"modules": ["one"], "report": True}}
    told = server.call("/v1/responses", {**ASKED, **report}).body["unbind"]
    assert told["modules"][0]["positions"] == len(told["activations"]) == 8
    *_, last = server.call("/v1/responses", {**ASKED, **report, "stream": True}).raw.decode().strip().split("data: ")
    streamed = json.loads(last)["response"]["unbind"]
    for now, before in zip(streamed.pop("activations"), told.pop("activations"), strict=True):
        assert now == pytest.approx(before, abs=1e-5)  # the prompt's states may come from the cache now
    assert streamed == told


def test_what_would_have_to_be_kept_is_refused_by_name(server: Live) -> None:
    for field in ("previous_response_id", "conversation", "prompt"):
        assert refused(server, **{field: {"id": "x"}}) == (400, field)
    assert refused(server, background=True) == (400, "background")
    assert refused(server, truncation="auto") == (400, "truncation")
    kept = server.call("/v1/responses", {**ASKED, "store": True, "background": False, "user": "me"}).body
    assert kept["store"] is False and server.call(f"/v1/responses/{kept['id']}").status == 404


def test_what_is_wrong_is_named_as_it_was_sent(server: Live) -> None:
    for wrong, field in (
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content"),
        ({"input": [{"type": "mcp_call"}]}, "input.0"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": "x " * 4000}, "input"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"model": "gpt"}, "model"),
        ({"unbind": {"modules": ["none"]}}, "unbind.modules"),
    ):
        assert refused(server, **wrong)[1] == field, wrong


def test_a_stream_that_fails_says_so_in_its_last_event(
    client: OpenAI, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(server, monkeypatch, step=3)
    with client.responses.create(**ASKED, stream=True) as stream:
        last: Any = list(stream)[-1]
    assert last.type == "response.failed" and "forward pass failed" in last.response.error.message
    fail_at(server, monkeypatch, step=1)
    with pytest.raises(openai.InternalServerError):
        client.responses.create(**ASKED)
