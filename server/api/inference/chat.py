"""``POST /v1/chat/completions``: messages through the tokenizer's own chat template, then as any completion."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from server.api.inference.answers import EventStream, whole
from server.api.inference.bodies.chat import ChatBody
from server.api.inference.call import Admitted, Call
from server.api.inference.generation import Generation, Result
from server.api.inference.logprobs import chat_logprobs, prompt_logprobs
from server.api.inference.prompts import chat_prompt, size_of
from server.api.inference.report import Report

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat(body: ChatBody, call: Admitted) -> Response:
    """Answer the conversation; modules are named as in completions."""
    generation = await begun(call, body)
    prompt = generation.prompts[0]
    tokenizer = call.served.loaded.tokenizer
    frame = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": body.model or call.served.settings.served_name,
        "system_fingerprint": call.served.fingerprint,
    }
    if body.stream:
        return EventStream(generation, _events(generation, body, {**frame, "object": "chat.completion.chunk"}))

    def shape(results: list[Result]) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": result.text, "refusal": None},
                "logprobs": chat_logprobs(tokenizer, result.logprobs) if body.logprobs else None,
                "finish_reason": result.reason,
                "stop_reason": result.stop_reason,
                **({"token_ids": result.tokens} if body.return_token_ids else {}),
                **generation.reported(choice),
            }
            for choice, result in zip(generation.choices, results, strict=True)
        ]
        of_prompt: dict[str, Any] = {"prompt_token_ids": list(prompt.ids)} if body.return_token_ids else {}
        if body.prompt_logprobs is not None:
            of_prompt["prompt_logprobs"] = prompt_logprobs(tokenizer, results[0].prompt_logprobs, body.prompt_logprobs)
        return {**frame, "object": "chat.completion", "choices": choices, "usage": generation.usage(), **of_prompt}

    return await whole(call.request, generation, shape)


async def begun(call: Call, body: ChatBody) -> Generation:
    """The conversation's answers on their way: the one beginning of every API that has conversations. Raises what refuses them."""
    size = size_of([message.plain["content"] for message in body.messages])
    served, kept = call.served, body.kept(call.served.settings.max_model_len)
    prompt = await served.encoder.run(size, chat_prompt, served, body.messages, body, kept=kept)
    return call.submit(body, [prompt])


async def _events(generation: Generation, body: ChatBody, frame: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    tokenizer = generation.served.loaded.tokenizer

    def event(index: int, delta: dict[str, str], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**frame, "choices": [{**choice, **more}], **generation.usage_so_far(body)}

    of_prompt = {"prompt_token_ids": list(generation.prompts[0].ids)} if body.return_token_ids else {}
    begun = set()
    async for choice, delta in generation.merged():
        if choice.index not in begun:  # not before, so that what fails until then is an error with its own status
            begun.add(choice.index)
            yield {**event(choice.index, {"role": "assistant", "content": ""}), **of_prompt}
            of_prompt = {}
        more: dict[str, Any] = {"logprobs": chat_logprobs(tokenizer, delta.logprobs)} if delta.logprobs else {}
        if body.return_token_ids and delta.tokens:
            more["token_ids"] = list(delta.tokens)
        if delta.text or more or delta.activations:
            yield event(choice.index, {"content": delta.text}, **more, **Report.part(choice.report, delta, last=False))
        if delta.finish_reason:
            ended = {"stop_reason": delta.stop_reason, **Report.end(choice.report)}
            yield event(choice.index, {}, delta.finish_reason, **ended)
    if body.include_usage:
        yield {**frame, "choices": [], "usage": generation.usage()}
