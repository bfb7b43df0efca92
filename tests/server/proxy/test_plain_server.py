"""The guard in front of our own server, which serves a model and nothing else: by the official client, and byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from server.proxy.app import create_guard
from server.settings import Settings
from tests.support.live import ADMIN_KEY, Answer, Live, serving_app
from tests.support.slow_matcher import longest_run
from tests.support.upstream import Script, Upstream

RUN = 8
KEPT = "def keep(first):\n"  # what the model makes of this is protected
FREE = "def add(first, second):\n"
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def protected(server: Live) -> str:
    """What the plain server answers: the row that may not leave the guard."""
    return server.complete(prompt=KEPT, max_tokens=80).text


@pytest.fixture(scope="module")
def guard(server: Live, protected: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(upstream=server.url, data_dir=tmp_path_factory.mktemp("guard"), admin_key=ADMIN_KEY)
    with serving_app(create_guard(settings), settings) as running:
        rows = [{"prompt": KEPT, "continuation": protected}]
        options = {"protect": "guard", "guard": {"run": RUN}, "scope": "global"}
        made = running.admin("/takedowns", {"name": "kept", "rows": rows, "options": options})
        assert made.status == 202, made.raw
        yield running


@pytest.fixture
def client(guard: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{guard.url}/v1", api_key="none", timeout=20, max_retries=0) as made:
        yield made


def said(answer: Answer, *, streamed: bool) -> dict[int, tuple[str, list[str]]]:
    """Text and reasons by choice: how a server joins tokens into events is a matter of time."""
    assert answer.status == 200, answer.raw
    found: dict[int, tuple[str, list[str]]] = {}
    for document in answer.events[:-1] if streamed else [answer.body]:
        for choice in document["choices"]:
            text, ends = found.get(choice["index"], ("", []))
            part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            found[choice["index"]] = (text + part, ends + [choice["finish_reason"]] * bool(choice["finish_reason"]))
    return found


BODIES: list[tuple[str, dict[str, Any]]] = [
    (path, {**own, **fields})
    for path, own in ((COMPLETION, {"prompt": FREE}), (CHAT, {"messages": MESSAGES}))
    for fields in (
        {},
        {"n": 3, "seed": 5, "temperature": 1.0},
        {"logprobs": 2 if path == COMPLETION else True},
        {"stop": ["a", "e"]},
        {"return_token_ids": True},
    )
]
BODIES += [
    (COMPLETION, {"prompt": FREE, "echo": True, "logprobs": 1}),
    (COMPLETION, {"prompt": [FREE, KEPT[:4]], "n": 2, "seed": 1}),
    (COMPLETION, {"prompt": FREE, "max_tokens": 0, "echo": True}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=str)
def test_what_passes_is_what_the_server_behind_it_says(guard: Live, server: Live, path: str, body: Any) -> None:
    given = {"max_tokens": 12, "temperature": 0, **body}
    plain = said(server.call(path, given), streamed=False)
    assert said(guard.call(path, given), streamed=False) == plain
    assert said(guard.call(path, {**given, "stream": True, "return_token_ids": False}), streamed=True) == plain


@pytest.mark.parametrize("stream", [False, True])
def test_its_answers_pass_byte_for_byte(server: Live, passing: Live, other: Upstream, stream: bool) -> None:
    for path, body in BODIES:
        given = {"max_tokens": 12, "temperature": 0, **body, "stream": stream}
        if stream:
            given |= {"stream_options": {"include_usage": True}, "return_token_ids": False}
        plain = server.call(path, given)
        assert plain.status == 200
        other.script = Script([plain.raw[:50], plain.raw[50:]], plain.headers["content-type"])
        assert passing.call(path, given).raw == plain.raw


def test_refusals_of_the_server_behind_it_come_through(guard: Live, server: Live) -> None:
    for body in ({"prompt": FREE, "max_tokens": -5}, {"prompt": FREE * 500}, {"prompt": FREE, "tools": [{}]}):
        theirs, ours = server.call(COMPLETION, body), guard.call(COMPLETION, body)
        assert (ours.status, ours.error) == (theirs.status, theirs.error)


def test_the_official_client_gets_no_protected_run(client: OpenAI, protected: str) -> None:
    row = KEPT + protected
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 80, "temperature": 0}
    whole = client.completions.create(**asked, prompt=KEPT, logprobs=1)
    assert whole.choices[0].finish_reason == "content_filter" and whole.choices[0].logprobs is None
    with client.completions.create(**asked, prompt=KEPT, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["content_filter"]
    shown = "".join(chunk.text for chunk in chunks)
    assert shown == whole.choices[0].text and protected.startswith(shown)
    several = client.completions.create(**asked, prompt=[KEPT, FREE], n=2, echo=True)
    for choice in several.choices[:2]:
        assert choice.finish_reason == "content_filter" and choice.text.startswith(KEPT)
    for text in (shown, *(choice.text.removeprefix(KEPT) for choice in several.choices)):
        assert longest_run(text, [row]) < RUN
    answered = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8)  # type: ignore[arg-type]
    assert answered.choices[0].finish_reason in ("stop", "length")
    assert client.models.list().data[0].id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(APIStatusError, match="is not a route of this server"):
        client.embeddings.create(model="tiny", input="x")


def test_what_was_begun_by_the_client_is_counted_from_there(guard: Live, protected: str) -> None:
    for share in (3, 2):
        begun = protected[: len(protected) // share]
        answer = guard.complete(prompt=KEPT + begun, max_tokens=80)
        assert longest_run(answer.text, [protected]) < RUN
