"""What the clients of llama.cpp and vLLM say beside: bounds of an answer, scores of a prompt and how much of it is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from server.api.inference.bodies.fields import DEFAULT_MAX_TOKENS, MAX_TOKENS, Time
from server.api.inference.bodies.generation import GenerationBody
from server.engine.request import Sampling
from server.errors import field_error


class LlamaBody(GenerationBody):
    """What llama.cpp's clients bound an answer by. Times in milliseconds; -1 and 0: no bound."""

    t_max_prompt_ms: Annotated[Time, Field(description="of computing the prompt, which is kept as far as it came")] = 0
    t_max_predict_ms: Annotated[Time, Field(description="from the first token on, once a line has ended")] = 0
    n_indent: Annotated[StrictInt, Field(ge=0, le=100_000, description="whitespace that lines must begin with")] = 0

    def sampling(self, max_tokens: int, choice: int, echo: bool) -> Sampling:
        """With the bounds."""
        return replace(
            super().sampling(max_tokens, choice, echo),
            prompt_seconds=max(self.t_max_prompt_ms, 0) / 1000,
            predict_seconds=max(self.t_max_predict_ms, 0) / 1000,
            least_indent=self.n_indent,
        )


class ScoredBody(GenerationBody):
    """What vLLM's clients ask of a prompt, beside what they ask of the answer."""

    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=20, description="alternatives by prompt token")] | None = None
    return_token_ids: StrictBool = False
    truncate_prompt_tokens: Annotated[
        Annotated[StrictInt, Field(ge=-1, le=MAX_TOKENS)] | None,
        Field(description="keep so many of the prompt's last tokens; -1: as many as fit"),
    ] = None

    @model_validator(mode="after")
    def _agree_on_the_prompt(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "do not come in streams; leave stream out")
        if self.truncate_prompt_tokens == 0:
            raise field_error("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit")
        return self

    def sampling(self, max_tokens: int, choice: int, echo: bool) -> Sampling:
        """With the larger number of alternatives that the prompt is scored for."""
        made = super().sampling(max_tokens, choice, echo)
        if self.prompt_logprobs is None:
            return made
        return replace(made, prompt_logprobs=max(self.prompt_logprobs, made.prompt_logprobs or 0))

    def kept(self, length: int, least: int) -> int | None:
        """How many of a prompt's last tokens are kept where ``length`` positions hold prompt and answer; None for all.
        ``least``: tokens of an answer for which there must be room.
        """
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        wanted = self.wanted if self.wanted is not None and self.wanted >= 0 else DEFAULT_MAX_TOKENS
        return max(1, length - max(least, wanted))
