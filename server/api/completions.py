"""``POST /v1/completions``: text continued, in plain order or into a gap, under the modules that the call names."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from starlette.responses import Response

from server.api.generation import EventStream, Generation, answer
from server.api.models import check_model
from server.api.schemas import CompletionBody
from server.errors import invalid
from server.policy import effective
from server.service import Service, service
from unbind_core.windows import encode_prompt, fim_prompt

router = APIRouter(prefix="/v1", tags=["completions"])
Served = Annotated[Service, Depends(service)]


@router.post("/completions")
async def complete(
    body: CompletionBody,
    request: Request,
    served: Served,
    x_unbind_modules: Annotated[str | None, Header(max_length=100_000)] = None,
) -> Response:
    """Continue each prompt; ``unbind.modules`` and the header ``X-Unbind-Modules`` name the modules to apply."""
    check_model(served, body.model)
    pinned = effective(served.engine.modules, body.unbind.modules if body.unbind else None, x_unbind_modules)
    prompts, leads = _prompts(served, body)
    generation = Generation(served, prompts, pinned)
    generation.submit(body, body.max_tokens, leads if body.echo else [""] * len(leads))
    frame = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.settings.served_name,
    }
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(generation, _events(generation, frame, usage))

    def shape(results: list[tuple[str, str]]) -> dict[str, Any]:
        choices = [_choice(index, text, reason) for index, (text, reason) in enumerate(results)]
        return {**frame, "choices": choices, "usage": generation.usage()}

    return await answer(request, generation, shape)


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


async def _events(generation: Generation, frame: dict[str, Any], usage: bool) -> AsyncIterator[dict[str, Any]]:
    async for index, delta in generation.merged():
        if delta.text or delta.finish_reason:
            yield {**frame, "choices": [_choice(index, delta.text, delta.finish_reason)]}
    if usage:
        yield {**frame, "choices": [], "usage": generation.usage()}


def _prompts(served: Service, body: CompletionBody) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt, encoded as fitting encodes them, and its text for an echo."""
    tokenizer = served.loaded.tokenizer
    prompt = body.prompt
    if isinstance(prompt, str):
        if body.suffix is None:
            return [encode_prompt(tokenizer, prompt)], [prompt]
        ids = fim_prompt(tokenizer, prompt, body.suffix)
        if ids is None:
            raise invalid(
                "suffix: this model's tokenizer has no fill-in-the-middle tokens; leave suffix out", param="suffix"
            )
        return [ids], [prompt]
    prompts: list[list[int]] = []
    leads: list[str] = []
    for item in [prompt] if isinstance(prompt[0], int) else prompt:
        prompts.append(encode_prompt(tokenizer, item) if isinstance(item, str) else [int(t) for t in item])
        leads.append(item if isinstance(item, str) else str(tokenizer.decode(item)) if body.echo else "")
    return prompts, leads
