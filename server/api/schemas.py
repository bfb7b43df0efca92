"""Request bodies of the OpenAI-compatible routes. Unknown fields are ignored, wrong ones are named.

Numbers out of range are refused rather than bent; null means "not given", as clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from server.engine.request import Sampling

DEFAULT_MAX_TOKENS = 128
MAX_CHOICES = 64
Strict = ConfigDict(extra="forbid")
Text = Annotated[StrictStr, Field(max_length=8_000_000)]
Name = Annotated[StrictStr, Field(min_length=1, max_length=200)]


class UnbindOptions(BaseModel):
    """The body's ``unbind`` object. Strict: a misspelt key here would silently leave a module out."""

    model_config = Strict
    modules: Annotated[list[Name], Field(max_length=4096)] = []


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: StrictBool = False


class GenerationBody(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    model: Name | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0, le=1_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=256)] | None = None
    ignore_eos: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    unbind: UnbindOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: Any) -> Any:
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none of them empty."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    def sampling(self, max_tokens: int, choice: int) -> Sampling:
        """The sampling of choice number ``choice``: with a seed, each choice has its own, and repeats."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=None if self.seed is None else self.seed + choice,
            stop=self.stops,
            ignore_eos=self.ignore_eos,
        )


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Text | list[StrictInt] | list[Text] | list[list[StrictInt]]
    suffix: Text | None = None
    echo: StrictBool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        """Say what is wrong in one sentence, where a union would say it four times."""
        if isinstance(value, list) and not value:
            raise ValueError("must not be an empty list")
        if not isinstance(value, (str, list)):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
        if isinstance(value, list):
            kinds = {type(item) for item in value}
            if len(kinds) != 1 or not kinds <= {str, int, list}:
                raise ValueError("must be all strings, all token ids or all lists of token ids")
            if kinds == {list} and not all(type(token) is int for item in value for token in item):
                raise ValueError("must hold integers only in its lists of token ids")
        return value

    @model_validator(mode="after")
    def _suffix_needs_text(self) -> CompletionBody:
        if self.suffix is not None and not isinstance(self.prompt, str):
            raise ValueError("suffix: goes with one prompt given as a string")
        return self


class Message(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[dict[str, Any]] | None = None

    def text(self) -> str:
        """The text of the message; parts of other kinds have none."""
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")
        return self.content or ""


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=0, le=1_000_000)] | None = None
