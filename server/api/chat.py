"""``POST /v1/chat/completions``: messages through the tokenizer's own chat template, then as any completion."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from jinja2 import TemplateError
from starlette.responses import Response

from server.api.generation import EventStream, Generation, answer
from server.api.models import check_model
from server.api.schemas import ChatBody
from server.errors import invalid
from server.policy import effective
from server.service import Service, service

router = APIRouter(prefix="/v1", tags=["chat"])
Served = Annotated[Service, Depends(service)]


@router.post("/chat/completions")
async def chat(
    body: ChatBody,
    request: Request,
    served: Served,
    x_unbind_modules: Annotated[str | None, Header(max_length=100_000)] = None,
) -> Response:
    """Answer the conversation; modules are named as in completions."""
    check_model(served, body.model)
    pinned = effective(served.engine.modules, body.unbind.modules if body.unbind else None, x_unbind_modules)
    generation = Generation(served, [_prompt(served, body)], pinned)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    generation.submit(body, wanted, [""])
    frame = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.settings.served_name}
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(generation, _events(generation, {**frame, "object": "chat.completion.chunk"}, usage))

    def shape(results: list[tuple[str, str]]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(results)
        ]
        return {**frame, "object": "chat.completion", "choices": choices, "usage": generation.usage()}

    return await answer(request, generation, shape)


def _prompt(served: Service, body: ChatBody) -> list[int]:
    tokenizer = served.loaded.tokenizer
    if not tokenizer.chat_template:
        raise invalid(
            "messages: this model's tokenizer has no chat template; send a prompt to /v1/completions instead",
            param="messages",
            code="no_chat_template",
        )
    messages = [{"role": "system" if m.role == "developer" else m.role, "content": m.text()} for m in body.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise invalid(f"messages: the chat template refuses them: {error}", param="messages") from None
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])


async def _events(generation: Generation, frame: dict[str, Any], usage: bool) -> AsyncIterator[dict[str, Any]]:
    def event(index: int, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**frame, "choices": [choice]}

    for choice in generation.choices:
        yield event(choice.index, {"role": "assistant", "content": ""})
    async for index, delta in generation.merged():
        if delta.text:
            yield event(index, {"content": delta.text})
        if delta.finish_reason:
            yield event(index, {}, delta.finish_reason)
    if usage:
        yield {**frame, "choices": [], "usage": generation.usage()}
