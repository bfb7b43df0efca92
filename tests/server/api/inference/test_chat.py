"""Chats: how the prompt begins and ends, how long an answer may be, what a message may hold; prompts that are too long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.live import Answer, Live
from unbind_core.encoding import encode

HELLO = {"role": "user", "content": "hello"}


def chat(server: Live, messages: Any, **fields: Any) -> Answer:
    """A greedy chat of a few tokens, unless told otherwise."""
    return server.call(
        "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_completion_tokens": 8, **fields}
    )


def said(answer: Answer) -> str:
    """The text of the answer."""
    assert answer.status == 200, answer.raw
    return str(answer.body["choices"][0]["message"]["content"])


def test_a_chat_without_a_limit_gets_what_fits(server: Live) -> None:
    made = chat(server, [HELLO], max_completion_tokens=None, ignore_eos=True).body
    assert made["usage"]["total_tokens"] == 256 and made["choices"][0]["finish_reason"] == "length"
    limited = chat(server, [HELLO], max_completion_tokens=None, max_tokens=3, ignore_eos=True).body
    assert limited["usage"]["completion_tokens"] == 3
    assert server.complete(max_tokens=None, ignore_eos=True).body["usage"]["completion_tokens"] == 128


def test_the_last_message_can_be_gone_on_in(server: Live) -> None:
    begun = [HELLO, {"role": "assistant", "content": "def answer("}]
    raw = server.complete(prompt="# user\nhello\n# assistant\ndef answer(", max_tokens=8).text
    assert said(chat(server, begun, continue_final_message=True)) == raw
    assert said(chat(server, begun, continue_final_message=True, add_generation_prompt=False)) == raw
    bare = server.complete(prompt="# user\nhello\n", max_tokens=8).text
    assert said(chat(server, [HELLO], add_generation_prompt=False)) == bare
    assert said(chat(server, [HELLO], add_generation_prompt=True)) == said(chat(server, [HELLO])) != bare
    ids = server.call("/tokenize", {"messages": begun, "continue_final_message": True}).body["tokens"]
    assert ids == encode(server.service.loaded.tokenizer, "# user\nhello\n# assistant\ndef answer(")


def test_a_refusal_in_the_conversation_is_its_text(server: Live) -> None:
    def asked(message: dict[str, Any]) -> str:
        return said(chat(server, [HELLO, {"role": "assistant", **message}, HELLO]))

    written = asked({"content": "I will not."})
    assert asked({"content": [{"type": "refusal", "refusal": "I will not."}]}) == written
    assert asked({"content": None, "refusal": "I will not."}) == written
    assert asked({"content": ""}) != written
    refused = chat(server, [{"role": "assistant", "content": [{"type": "refusal"}]}])
    assert (refused.status, refused.error["param"]) == (400, "messages.0.content")


def test_the_role_comes_with_the_first_token_and_once(server: Live) -> None:
    events = chat(server, [HELLO], n=2, stream=True).events[:-1]
    for index in (0, 1):
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in deltas[1:]) and "".join(d.get("content", "") for d in deltas)


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(server: Live) -> None:
    long = "word " * 2000
    for answer in (server.complete(prompt=long), chat(server, [{"role": "user", "content": long}])):
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["message"].startswith("This model's maximum context length is 256 tokens")


@pytest.fixture
def beginning(server: Live) -> Iterator[list[int]]:
    """The tokenizer has a token for the beginning, and puts it there."""
    tokenizer: Any = server.service.loaded.tokenizer
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.add_bos_token = True
    yield [tokenizer.bos_token_id]
    tokenizer.add_bos_token = False
    tokenizer.bos_token = None


def test_tokenize_counts_a_prompt_as_requests_do(server: Live, beginning: list[int]) -> None:
    ids = encode(server.service.loaded.tokenizer, "def add(")

    def tokens(**body: Any) -> Any:
        return server.call("/tokenize", body).body["tokens"]

    assert tokens(prompt="def add(") == beginning + ids
    assert server.complete(prompt="def add(").body["usage"]["prompt_tokens"] == len(ids) + 1
    assert tokens(content="def add(") == ids == tokens(prompt="def add(", add_special_tokens=False)
    assert tokens(content="def add(", add_special=True) == beginning + ids
