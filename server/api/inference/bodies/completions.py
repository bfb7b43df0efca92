"""Bodies of text to continue, in plain order or into a gap."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, field_validator, model_validator

from server.api.inference.bodies.dialects import ScoredBody
from server.api.inference.bodies.fields import MAX_CHOICES, MAX_TOKENS, Text
from server.api.inference.bodies.forms import FormBody
from server.api.inference.bodies.generation import GenerationBody
from server.errors import field_error


class PromptBody(GenerationBody):
    """A prompt in any of its forms."""

    prompt: Text | list[StrictInt] | list[Text] | list[list[StrictInt]]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        """Say what is wrong in one sentence, where a union would say it four times."""
        if isinstance(value, list) and not value:
            raise ValueError("must not be an empty list")
        if not isinstance(value, (str, list)):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
        if isinstance(value, list):
            if len(value) > MAX_TOKENS:
                raise ValueError(f"must not hold more than {MAX_TOKENS} token ids")
            kinds = {type(item) for item in value}
            if len(kinds) != 1 or not kinds <= {str, int, list}:
                raise ValueError("must be all strings, all token ids or all lists of token ids")
            if kinds == {list} and not all(type(token) is int for item in value for token in item):
                raise ValueError("must hold integers only in its lists of token ids")
            if kinds != {int} and len(value) > 1024:
                raise ValueError("must not hold more than 1024 prompts")
        return value


class CompletionBody(PromptBody, ScoredBody, FormBody):
    """``POST /v1/completions``."""

    suffix: Text | None = None
    echo: StrictBool = False
    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @property
    def alternatives(self) -> int | None:
        """``logprobs`` counts the alternatives."""
        return self.logprobs

    @model_validator(mode="after")
    def _agree(self) -> CompletionBody:
        if self.suffix is not None and not isinstance(self.prompt, str):
            raise field_error("suffix", "goes with one prompt given as a string")
        if self.suffix is not None and self.truncate_prompt_tokens is not None:
            raise field_error(
                "truncate_prompt_tokens", "would cut the mark of the gap off; send a shorter prompt with a suffix"
            )
        if self.best_of is not None and self.best_of != self.n:
            raise field_error("best_of", "choosing among more answers than n is not offered; leave it out or give n")
        return self


class FimBody(GenerationBody):
    """``POST /v1/fim/completions``."""

    prompt: Text
    suffix: Text | None = None
