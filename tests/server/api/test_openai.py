"""The official client: sync, async, streams, errors by their classes, and what it tries again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.live import Live, fail_at

PROMPT = "def add(first, second):\n"
FIELDS: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_completion_tokens": 12,
    "temperature": 0,
}


@pytest.fixture
def client(server: Live) -> Iterator[OpenAI]:
    """Tries again twice, as by default."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=20) as made:
        yield made


def asked(server: Live, status: int) -> float:
    """How many completions ended with this status."""
    return sum(
        sample.value
        for metric in server.service.telemetry.requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels == {"route": "/v1/completions", "status": str(status)}
    )


def test_a_stream_and_a_whole_answer_say_the_same(client: OpenAI) -> None:
    whole = client.completions.create(**FIELDS)
    with client.completions.create(**FIELDS, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.prompt_tokens_details is not None and whole.usage.prompt_tokens_details.cached_tokens is not None
    said = client.chat.completions.create(**CHAT)
    with client.chat.completions.create(**CHAT, stream=True) as deltas:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert text == said.choices[0].message.content


def test_modules_by_body_header_and_alias(client: OpenAI) -> None:
    plain = client.completions.create(**FIELDS).choices[0].text
    made = [
        client.completions.create(**FIELDS, extra_body={"unbind": {"modules": {"one": 0.5}}}),
        client.completions.create(**FIELDS, extra_headers={"X-Unbind-Modules": "one=0.5"}),
        client.completions.create(**{**FIELDS, "model": "tiny~safe"}),
    ]
    assert len({answer.choices[0].text for answer in made} | {plain}) == 2
    assert made[2].model == "tiny~safe"
    assert {model.id for model in client.models.list()} >= {"tiny", "tiny~safe"}
    assert client.models.retrieve("tiny~safe").id == "tiny~safe"


def test_many_at_once(server: Live) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            alone = [
                (await made.completions.create(**{**FIELDS, "prompt": PROMPT * n})).choices[0].text for n in (1, 2, 3)
            ]

            async def streamed(n: int) -> str:
                stream = await made.completions.create(**{**FIELDS, "prompt": PROMPT * n}, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            assert await asyncio.gather(*(streamed(n) for n in (1, 2, 3, 1, 2, 3))) == alone * 2

    asyncio.run(run())


def test_errors_are_of_the_classes_that_programs_catch(client: OpenAI, server: Live) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(**{**FIELDS, "temperature": -1})
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error") and bad.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**FIELDS, "model": "gpt"})
    with pytest.raises(openai.PermissionDeniedError):
        client.completions.create(
            **FIELDS, extra_headers={"X-Unbind-Modules": "-two"}, extra_body={"model": "tiny~strict"}
        )
    with pytest.raises(openai.AuthenticationError):
        client.get("/../admin/v1/keys", cast_to=object)


def test_a_permanent_failure_is_not_tried_again(client: OpenAI, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(server.service.engine.runner, "forward", failing)
    before = asked(server, 500)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(**FIELDS)
    assert asked(server, 500) == before + 1


def test_a_full_house_is_tried_again_and_then_answered(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = server.service.engine.scheduler
    check, refusals = scheduler.check_room, 0

    def full_once(*given: Any) -> None:
        nonlocal refusals
        refusals += 1
        monkeypatch.setattr(scheduler, "queue_limit", -100 if refusals == 1 else 64)
        check(*given)

    monkeypatch.setattr(scheduler, "check_room", full_once)
    before = asked(server, 429)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as made:
        assert made.completions.create(**FIELDS).choices[0].text
    assert refusals == 2 and asked(server, 429) == before + 1


def test_an_error_in_mid_stream_is_raised(client: OpenAI, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(server, monkeypatch, step=3)
    with (
        pytest.raises(openai.APIError, match="forward pass failed"),
        client.completions.create(**FIELDS, stream=True) as s,
    ):
        list(s)
