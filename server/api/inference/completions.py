"""``POST /v1/completions``: text continued, in plain order or into a gap, under the modules that apply to the call."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from server.api.inference.answers import STREAMED, EventStream, off_loop, whole
from server.api.inference.bodies.completions import CompletionBody
from server.api.inference.call import Admitted
from server.api.inference.generation import Choice, Generation, Result
from server.api.inference.logprobs import LegacyLogprobs, prompt_logprobs
from server.api.inference.prompts import completion_prompts, size_of
from server.api.inference.report import Report
from server.engine.request import TokenLogprob
from unbind_core.guard.escapes import AS_JSON

router = APIRouter(prefix="/v1", tags=["completions"])


@router.post("/completions", responses=STREAMED)
async def complete(body: CompletionBody, call: Admitted) -> Response:
    """Continue each prompt; ``unbind.modules`` and the header ``X-Unbind-Modules`` name modules to apply."""
    size = size_of(body.prompt, body.suffix)
    served, kept = call.served, body.kept(call.served.settings.max_model_len, call.served.engine.least_tokens)
    prompts = await served.encoder.run(size, completion_prompts, served, body.prompt, body.suffix, body.echo, kept)
    grammar = await call.grammar(body.wanted_form)
    generation = call.submit(body, prompts, echo=body.echo, grammar=grammar, readings=AS_JSON if grammar else ())
    frame = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or call.served.settings.served_name,
        "system_fingerprint": call.served.fingerprint,
    }
    if body.stream:
        return EventStream(generation, _events(generation, body, frame))

    def shape(results: list[Result]) -> dict[str, Any]:
        choices = [
            {
                **_choice(choice, result.text, _logprobs(generation, body, choice, result), result.reason),
                "stop_reason": result.stop_reason,
                **_prompt_scores(generation, body, result),
                **_token_ids(body, choice, result.tokens, first=True),
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
    echoed = _echoed(body, result.prompt_logprobs)
    return LegacyLogprobs(generation.served.loaded.tokenizer).of(
        [*echoed, *result.logprobs], choice.prompt.ids if echoed else (), choice.prompt.spelt
    )


def _echoed(body: CompletionBody, scored: Sequence[TokenLogprob | None]) -> list[TokenLogprob | None]:
    """The prompt's entries for ``logprobs``; it may have been scored for ``prompt_logprobs`` alone, or with more alternatives."""
    if not body.echo or body.logprobs is None:
        return []
    return [entry and replace(entry, top=entry.top[: body.logprobs]) for entry in scored]


def _prompt_scores(generation: Generation, body: CompletionBody, result: Result) -> dict[str, Any]:
    if body.prompt_logprobs is None:
        return {}
    tokenizer = generation.served.loaded.tokenizer
    return {"prompt_logprobs": prompt_logprobs(tokenizer, result.prompt_logprobs, body.prompt_logprobs)}


def _token_ids(body: CompletionBody, choice: Choice, tokens: Sequence[int], first: bool) -> dict[str, Any]:
    if not body.return_token_ids:
        return {}
    return {"token_ids": list(tokens), "prompt_token_ids": list(choice.prompt.ids) if first else None}


async def _events(generation: Generation, body: CompletionBody, frame: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    tokenizer = generation.served.loaded.tokenizer
    begun: set[int] = set()
    written = [LegacyLogprobs(tokenizer) for _ in generation.choices]
    async for choice, delta in generation.merged():
        entries = [*_echoed(body, delta.prompt_logprobs), *delta.logprobs]
        ids = _token_ids(body, choice, delta.tokens, choice.index not in begun)
        if not (delta.text or delta.finish_reason or entries or delta.activations or (ids and delta.tokens)):
            continue
        begun.add(choice.index)
        prompt = choice.prompt.ids if delta.prompt_logprobs else ()
        shape = partial(written[choice.index].of, entries, prompt, choice.prompt.spelt)
        logprobs = await off_loop(len(entries), shape) if entries else None
        shaped = _choice(choice, delta.text, logprobs, delta.finish_reason)
        stopped = {"stop_reason": delta.stop_reason} if delta.finish_reason else {}
        shaped |= stopped | ids | Report.part(choice.report, delta)
        yield {**frame, "choices": [shaped], **generation.usage_so_far(body)}
    if body.include_usage:
        yield {**frame, "choices": [], "usage": generation.usage()}
