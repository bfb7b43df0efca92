"""``POST /infill``: a gap filled, as llama.cpp's server takes and answers it, for the editors that speak its language."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr
from starlette.responses import Response

from server.api.inference.answers import STREAMED, EventStream, whole
from server.api.inference.bodies.dialects import LlamaBody
from server.api.inference.bodies.fields import DEFAULT_MAX_TOKENS, MAX_CHOICES, Text
from server.api.inference.bodies.forms import NativeFormBody
from server.api.inference.call import Admitted, Call
from server.api.inference.generation import Choice, Generation, Result, ended_by
from server.api.inference.prompts import Prompt, infill_prompt, size_of
from server.api.inference.report import Report
from server.engine.request import Sampling
from unbind_core.guard.escapes import AS_JSON

OTHERS_TEMPERATURE = 0.8  # llama.cpp's own; its clients ask for several answers to show different ones
router = APIRouter(tags=["completions"])


class ExtraFile(BaseModel):
    """A file beside the one that is edited."""

    filename: StrictStr = ""
    text: Text


class NativeBody(LlamaBody, NativeFormBody):
    """What llama.cpp's clients send. Greedy where no temperature is given: an editor wants the likeliest text."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, validate_by_name=True)
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    repetition_penalty: Annotated[
        float,
        Field(ge=0.01, le=10, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")),
    ] = 1.0
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES, validation_alias=AliasChoices("n_cmpl", "n"))] = 1
    cache_prompt: Annotated[StrictBool, Field(description="taken as true: prefixes are always kept")] = True
    response_fields: Annotated[list[StrictStr], Field(max_length=256)] | None = None

    def sampling(self, max_tokens: int, choice: int, echo: bool) -> Sampling:
        """Of several greedy answers the first is, and the others are sampled; seed -1 is none."""
        made = super().sampling(max_tokens, choice, echo)
        others = choice % self.n > 0 and made.temperature == 0
        return replace(
            made,
            temperature=OTHERS_TEMPERATURE if others else made.temperature,
            seed=None if self.seed == -1 else made.seed,
        )


class InfillBody(NativeBody):
    """``POST /infill``."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[tuple[ExtraFile, ...], Field(max_length=1024)] = ()
    prompt: Annotated[Text, Field(description="what the answer begins with, after the gap's mark")] = ""


@router.post("/infill", responses=STREAMED)
async def infill(body: InfillBody, call: Admitted) -> Response:
    """Fill the gap between ``input_prefix`` and ``input_suffix``; ``n_predict`` 0 only warms the cache."""
    new = body.wanted if body.wanted is not None and body.wanted >= 0 else DEFAULT_MAX_TOKENS
    extra = [(file.filename, file.text) for file in body.input_extra]
    size = size_of([body.input_prefix, body.input_suffix, body.prompt], *(name + text for name, text in extra))
    prompt = await call.served.encoder.run(
        size, infill_prompt, call.served, body.input_prefix, body.input_suffix, extra, body.prompt, new
    )
    return await native_answer(call, body, [prompt])


async def native_answer(call: Call, body: NativeBody, prompts: list[Prompt]) -> Response:
    """The answer in llama.cpp's shape: an object, or an array of them where there are several."""
    grammar = await call.grammar(body.wanted_form)
    generation = call.submit(body, prompts, grammar=grammar, readings=AS_JSON if grammar else ())
    if body.stream:
        return EventStream(generation, _events(generation, body), done=b"")

    def shape(results: list[Result]) -> Any:
        answers = [
            _fields(_final(generation, choice, result.text, result.reason, result.tokens, result.ended_by), body)
            for choice, result in zip(generation.choices, results, strict=True)
        ]
        return answers if len(answers) > 1 else answers[0]

    return await whole(call.request, generation, shape)


async def _events(generation: Generation, body: NativeBody) -> AsyncIterator[dict[str, Any]]:
    async for choice, delta in generation.merged():
        left = list(delta.tokens)  # of those that add no text too, such as the first half of a character
        if delta.text or (left and not delta.finish_reason):
            yield _fields(_partial(choice, delta.text, left), body)
            left = []
        if delta.finish_reason:
            final = _final(generation, choice, "", delta.finish_reason, left, ended_by(delta))
            yield _fields({**final, **Report.end(choice.report)}, body)


def _partial(choice: Choice, text: str, tokens: list[int]) -> dict[str, Any]:
    return {
        "index": choice.index,
        "content": text,
        "tokens": tokens,
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": choice.tokens,
        "tokens_evaluated": len(choice.prompt.ids),
    }


def _final(
    generation: Generation, choice: Choice, text: str, reason: str, tokens: list[int], stop_type: str
) -> dict[str, Any]:
    cached, evaluated = choice.flight.cached_tokens, len(choice.prompt.ids)
    return {
        "index": choice.index,
        "content": text,
        "tokens": tokens,
        "id_slot": -1,
        "stop": True,
        "model": generation.served.settings.served_name,
        "tokens_predicted": choice.tokens,
        "tokens_evaluated": evaluated,
        "tokens_cached": evaluated + choice.tokens,
        "truncated": choice.prompt.truncated,
        "stop_type": stop_type,
        "finish_reason": reason,
        "timings": _timings(generation, choice, cached),
        **generation.reported(choice),
    }


def _timings(generation: Generation, choice: Choice, cached: int) -> dict[str, float]:
    first = choice.first_at if choice.first_at is not None else generation.started
    prompt_ms, predicted_ms = (first - generation.started) * 1000, max(choice.last_at - first, 0.0) * 1000
    prompt_n = len(choice.prompt.ids) - cached
    made: dict[str, float] = {"cache_n": cached}
    after_first = max(choice.tokens - 1, 0)  # the time of the first token is the prompt's
    for name, count, timed, spent in (
        ("prompt", prompt_n, prompt_n, prompt_ms),
        ("predicted", choice.tokens, after_first, predicted_ms),
    ):
        made |= {
            f"{name}_n": count,
            f"{name}_ms": round(spent, 3),
            f"{name}_per_token_ms": round(spent / timed, 3) if timed else 0.0,
            f"{name}_per_second": round(timed * 1000 / spent, 3) if spent else 0.0,
        }
    return made


def _fields(answer: dict[str, Any], body: NativeBody) -> dict[str, Any]:
    """Only the fields that were asked for; a path like ``timings/prompt_n`` is a key of its own, with slashes."""
    if not body.response_fields:
        return answer
    chosen: dict[str, Any] = {}
    for path in body.response_fields:
        value: Any = answer
        for part in path.split("/"):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            chosen[path] = value
    return chosen
