"""``POST /v1/fim/completions``: a gap filled, in the shape of the editors that ask here: chat deltas for a prompt.

Their readers take ``choices[0].delta.content`` of every chunk unguarded, so every chunk has it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from server.api.inference.answers import STREAMED, EventStream, whole
from server.api.inference.bodies.completions import FimBody
from server.api.inference.call import Admitted
from server.api.inference.generation import Generation, Result
from server.api.inference.prompts import completion_prompts, size_of
from server.api.inference.report import Report

router = APIRouter(tags=["completions"])


@router.post("/v1/fim/completions", responses=STREAMED)
@router.post("/fim/completions", include_in_schema=False)
async def fill(body: FimBody, call: Admitted) -> Response:
    """Fill the gap between ``prompt`` and ``suffix``; without a suffix, continue."""
    size = size_of(body.prompt, body.suffix)
    prompts = await call.served.encoder.run(size, completion_prompts, call.served, body.prompt, body.suffix, echo=False)
    generation = call.submit(body, prompts)
    frame = {
        "id": f"fim-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": body.model or call.served.settings.served_name,
        "system_fingerprint": call.served.fingerprint,
    }
    if body.stream:
        return EventStream(generation, _events(generation, {**frame, "object": "chat.completion.chunk"}))

    def shape(results: list[Result]) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": result.text},
                "finish_reason": result.reason,
                **generation.reported(choice),
            }
            for choice, result in zip(generation.choices, results, strict=True)
        ]
        return {**frame, "object": "chat.completion", "choices": choices, "usage": generation.usage()}

    return await whole(call.request, generation, shape)


async def _events(generation: Generation, frame: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    ended = 0
    async for choice, delta in generation.merged():
        ended += delta.finish_reason is not None
        if not (delta.text or delta.finish_reason or delta.activations):
            continue
        shaped = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": delta.text},
            "finish_reason": delta.finish_reason,
        }
        event = {**frame, "choices": [{**shaped, **Report.part(choice.report, delta)}]}
        yield {**event, "usage": generation.usage()} if ended == len(generation.choices) else event
