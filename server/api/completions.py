"""``POST /v1/completions``: text continued, in plain order or into a gap, under the modules that apply to the call."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from server.api.answers import EventStream, whole
from server.api.call import Admitted
from server.api.generation import Choice, Generation, Result
from server.api.logprobs import LegacyLogprobs
from server.api.prompts import completion_prompts, size_of
from server.api.report import Report
from server.api.schemas import CompletionBody

router = APIRouter(prefix="/v1", tags=["completions"])


@router.post("/completions")
async def complete(body: CompletionBody, call: Admitted) -> Response:
    """Continue each prompt; ``unbind.modules`` and the header ``X-Unbind-Modules`` name modules to apply."""
    size = size_of(body.prompt, body.suffix)
    prompts = await call.served.encoder.run(size, completion_prompts, call.served, body.prompt, body.suffix, body.echo)
    generation = call.submit(body, prompts, echo=body.echo)
    frame = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or call.served.settings.served_name,
    }
    if body.stream:
        return EventStream(generation, _events(generation, body, frame))

    def shape(results: list[Result]) -> dict[str, Any]:
        choices = [
            {
                **_choice(choice, result.text, _logprobs(generation, body, choice, result), result.reason),
                **generation.reported(choice),
            }
            for choice, result in zip(generation.choices, results, strict=True)
        ]
        return {**frame, "choices": choices, "usage": generation.usage()}

    return await whole(call.request, generation, shape)


def _choice(choice: Choice, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(
    generation: Generation, body: CompletionBody, choice: Choice, result: Result
) -> dict[str, list[Any]] | None:
    if body.logprobs is None:
        return None
    return LegacyLogprobs(generation.served.loaded.tokenizer).of(
        result.logprobs, choice.prompt.ids if body.echo else ()
    )


async def _events(generation: Generation, body: CompletionBody, frame: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    usage = {"usage": None} if body.include_usage else {}
    tokenizer = generation.served.loaded.tokenizer
    written = [LegacyLogprobs(tokenizer) for _ in generation.choices]
    async for choice, delta in generation.merged():
        entries = [*delta.prompt_logprobs, *delta.logprobs] if body.logprobs is not None else []
        if not (delta.text or delta.finish_reason or entries or delta.activations):
            continue
        prompt = choice.prompt.ids if delta.prompt_logprobs else ()
        logprobs = written[choice.index].of(entries, prompt) if entries else None
        shaped = _choice(choice, delta.text, logprobs, delta.finish_reason)
        yield {**frame, "choices": [{**shaped, **Report.part(choice.report, delta)}], **usage}
    if body.include_usage:
        yield {**frame, "choices": [], "usage": generation.usage()}
