"""``POST /v1/chat/completions``: messages through the tokenizer's own chat template, then as any completion."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from server.api.inference.answers import STREAMED, EventStream, whole
from server.api.inference.bodies.chat import ChatBody
from server.api.inference.call import Admitted, Call
from server.api.inference.generation import Generation, Result
from server.api.inference.logprobs import chat_logprobs, prompt_logprobs
from server.api.inference.prompts import Prompt, chat_prompt, chat_size
from server.api.inference.report import Report
from server.api.inference.tokens import most_tokens
from server.api.inference.tools.calling import Calling, Speech, calling_of, wanted_form
from server.service import Service
from unbind_core.guard.escapes import AS_JSON

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", responses=STREAMED)
@router.post("/chat/completions", include_in_schema=False)
async def chat(body: ChatBody, call: Admitted) -> Response:
    """Answer the conversation; modules are named as in completions."""
    generation, calling = await begun(call, body)
    prompt = generation.prompts[0]
    tokenizer = call.served.loaded.tokenizer
    frame = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": body.model or call.served.settings.served_name,
        "system_fingerprint": call.served.fingerprint,
    }
    if body.stream:
        frame["object"] = "chat.completion.chunk"
        return EventStream(generation, _events(generation, body, frame, calling))

    def shape(results: list[Result]) -> dict[str, Any]:
        choices = []
        for choice, result in zip(generation.choices, results, strict=True):
            speech = calling.speech() if calling else Speech()
            speech.deltas(result.text, result.reason)
            choices.append(
                {
                    "index": choice.index,
                    "message": speech.message,
                    "logprobs": chat_logprobs(tokenizer, result.logprobs) if body.logprobs else None,
                    "finish_reason": speech.reason(result.reason),
                    "stop_reason": result.stop_reason,
                    **({"token_ids": result.tokens} if body.return_token_ids else {}),
                    **generation.reported(choice),
                }
            )
        of_prompt: dict[str, Any] = {"prompt_token_ids": list(prompt.ids)} if body.return_token_ids else {}
        if body.prompt_logprobs is not None:
            of_prompt["prompt_logprobs"] = prompt_logprobs(tokenizer, results[0].prompt_logprobs, body.prompt_logprobs)
        return {**frame, "object": "chat.completion", "choices": choices, "usage": generation.usage(), **of_prompt}

    return await whole(call.request, generation, shape)


async def begun(call: Call, body: ChatBody) -> tuple[Generation, Calling | None]:
    """The conversation's answers on their way, and how they call functions: the one beginning of every API that has conversations.

    Raises what refuses them.
    """
    calling = calling_of(call.served, body)
    wanted = wanted_form(body, calling)
    prompt = await prompted(call.served, body)
    generation = call.submit(
        body,
        [prompt],
        grammar=await call.grammar(wanted),
        shown=calling.shown if calling else frozenset(),
        readings=calling.readings if calling else AS_JSON if wanted else (),
    )
    return generation, calling


async def prompted(served: Service, body: ChatBody, most: int | None = None) -> Prompt:
    """The conversation as a prompt, of at most ``most`` tokens. Raises ApiError."""
    size = chat_size(body.messages, body.offered)
    kept = body.kept(served.settings.max_model_len, served.engine.least_tokens)
    return await served.encoder.run(
        size, chat_prompt, served, body.messages, body, most=most, kept=kept, tools=body.offered
    )


async def length(served: Service, body: ChatBody) -> int:
    """How many tokens the conversation is as a prompt: more than a request may have, too, as for ``/tokenize``. Raises ApiError."""
    calling_of(served, body)
    return len((await prompted(served, body, most_tokens(served))).ids)


async def _events(
    generation: Generation, body: ChatBody, frame: dict[str, Any], calling: Calling | None
) -> AsyncIterator[dict[str, Any]]:
    tokenizer = generation.served.loaded.tokenizer
    speeches = [calling.speech() if calling else Speech() for _ in generation.choices]

    def event(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**frame, "choices": [{**choice, **more}], **generation.usage_so_far(body)}

    of_prompt = {"prompt_token_ids": list(generation.prompts[0].ids)} if body.return_token_ids else {}
    begun = set()
    async for choice, delta in generation.merged():
        if choice.index not in begun:  # not before, so that what fails until then is an error with its own status
            begun.add(choice.index)
            # of a call alone there is no text, and clients would show an empty one
            content = None if body.demanded else ""
            yield {**event(choice.index, {"role": "assistant", "content": content}), **of_prompt}
            of_prompt = {}
        more: dict[str, Any] = {"logprobs": chat_logprobs(tokenizer, delta.logprobs)} if delta.logprobs else {}
        if body.return_token_ids and delta.tokens:
            more["token_ids"] = list(delta.tokens)
        speech = speeches[choice.index]
        said = speech.deltas(delta.text, delta.finish_reason)
        if more or delta.activations or said:
            more |= Report.part(choice.report, delta, last=False)
            yield event(choice.index, said[0] if said else {"content": ""}, **more)
        for part in said[1:]:
            yield event(choice.index, part)
        if delta.finish_reason:
            ended = {"stop_reason": delta.stop_reason, **Report.end(choice.report)}
            yield event(choice.index, {}, speech.reason(delta.finish_reason), **ended)
    if body.include_usage:
        yield {**frame, "choices": [], "usage": generation.usage()}
