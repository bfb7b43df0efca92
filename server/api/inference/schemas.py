"""Request bodies of the routes that generate. Wrong fields are named, unknown ones refused or ignored and logged once.

Numbers out of range are refused rather than bent; null means "not given", as clients send it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from server.api.inference.unsupported import UNSUPPORTED, refuse_unsupported, unsupported
from server.engine.request import Sampling
from server.errors import field_error
from server.rules import MAX_MODULES, MAX_STRENGTH

log = logging.getLogger("unbind.http")
DEFAULT_MAX_TOKENS = 128
MAX_CHOICES = 64
MAX_TOKENS = 1_000_000
MAX_STOP_LENGTH = 16_384  # characters of all stop strings together
Text = Annotated[StrictStr, Field(max_length=8_000_000)]
Name = Annotated[StrictStr, Field(min_length=1, max_length=200)]
TokenCount = Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)]
Prediction = Annotated[StrictInt, Field(ge=-1, le=MAX_TOKENS)]  # -1: as much as fits
Time = Annotated[float, Field(ge=-1, le=86_400_000)]
_noticed: set[tuple[str, str]] = set()


def drop_nulls(cls: type[BaseModel], body: Any) -> Any:
    """The body without its nulls. Fields that nothing reads are refused where they matter, else logged, each once."""
    if not isinstance(body, dict):
        return body
    aliases = (field.validation_alias for field in cls.model_fields.values())
    known = {str(name) for alias in aliases if isinstance(alias, AliasChoices) for name in alias.choices}
    known |= cls.model_fields.keys()
    refuse_unsupported(body, known)
    for name in body.keys() - known - UNSUPPORTED.keys():
        seen = (cls.__name__, str(name)[:64])
        if seen not in _noticed and len(_noticed) < 256:
            _noticed.add(seen)
            log.info("ignored field %r of a %s", seen[1], seen[0])
    return {key: value for key, value in body.items() if value is not None}


class UnbindOptions(BaseModel):
    """The body's ``unbind`` object. Strict: a misspelt key here would silently leave a module out."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    modules: Annotated[
        list[Name] | dict[Name, Annotated[float, Field(ge=0, le=MAX_STRENGTH)]],
        Field(max_length=MAX_MODULES, description="names, or names with multiples of the calibrated strength"),
    ] = []
    report: Annotated[StrictBool, Field(description="add what the gates did to the answer")] = False

    @field_validator("modules", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        if not isinstance(value, (list, dict)):
            raise ValueError("must be a list of module names, or an object of names and strengths")
        return value


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: StrictBool = False
    continuous_usage_stats: Annotated[StrictBool, Field(description="with include_usage: in every chunk")] = False


class OllamaOptions(BaseModel):
    """``options`` as some editors send it beside an OpenAI body; the length is all that is read."""

    num_predict: Prediction | None = None


class LenientBody(BaseModel):
    """A body whose unknown fields are ignored, unless they would change the answer."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: Any) -> Any:
        return drop_nulls(cls, body)


class GenerationBody(LenientBody):
    """What every body for generation has."""

    model: Name | None = None
    max_tokens: TokenCount | None = None
    n_predict: Annotated[Prediction, Field(description="max_tokens by another name")] | None = None
    options: OllamaOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=-1, le=10_000_000, description="0 or -1: off")] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=4096),
    ] = {}
    seed: Annotated[
        Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None,
        Field(validation_alias=AliasChoices("seed", "random_seed")),
    ] = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=1024)] | None = None
    stop_token_ids: Annotated[
        list[Annotated[StrictInt, Field(ge=0)]],
        Field(max_length=128, description="end the answer as the end token does"),
    ] = []
    min_tokens: Annotated[TokenCount, Field(description="nothing ends the answer before")] = 0
    ignore_eos: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    unbind: UnbindOptions | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "goes with stream; leave it out, or set stream to true")
        return self

    @field_validator("stop")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if sum(map(len, [value] if isinstance(value, str) else value or ())) > MAX_STOP_LENGTH:
            raise ValueError(
                f"must not have more than {MAX_STOP_LENGTH} characters together; send fewer or shorter ones"
            )
        return value

    @property
    def wanted(self) -> int | None:
        """How many tokens were asked for under any of the names; -1 for as many as fit, None where nobody said."""
        if self.max_tokens is not None:
            return self.max_tokens
        return self.n_predict if self.n_predict is not None else self.options.num_predict if self.options else None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to list beside each token's log-probability; None for no log-probabilities."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none of them empty."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    def sampling(self, max_tokens: int, choice: int, echo: bool) -> Sampling:
        """The sampling of choice number ``choice``: with a seed, each choice has its own, and repeats."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature if self.temperature > 1e-6 else 0.0,  # below, it is greedy but for rounding
            top_p=max(self.top_p, 1e-9),
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()} or (),
            min_tokens=self.min_tokens,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.alternatives,
            prompt_logprobs=self.alternatives if echo else None,
        )


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

    def kept(self, length: int) -> int | None:
        """How many of a prompt's last tokens are kept where ``length`` positions hold prompt and answer; None for all."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, length - (self.wanted if self.wanted is not None and self.wanted >= 0 else DEFAULT_MAX_TOKENS))


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


class CompletionBody(PromptBody, ScoredBody):
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


class Message(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[dict[str, Any]] | None = None
    refusal: Text | None = None
    tool_calls: Any = None
    function_call: Any = None

    @field_validator("content")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            if not isinstance(_text_of(part), str):
                raise ValueError("parts must be of type text with their text; this server reads nothing else")
        return value

    @field_validator("tool_calls", "function_call")
    @classmethod
    def _no_calls(cls, value: Any) -> Any:
        if value:
            raise unsupported("")
        return value

    @property
    def plain(self) -> dict[str, str]:
        """Role and text as chat templates take them; ``developer`` is the newer name of ``system``."""
        content = self.content if self.content is not None else self.refusal
        text = "".join(_text_of(part) for part in content) if isinstance(content, list) else content or ""
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


def _text_of(part: dict[str, Any]) -> Any:
    """A part's text, which for a refusal stands under its own name; None for parts of other types."""
    match part.get("type"):
        case "text" | "input_text":
            return part.get("text")
        case "refusal":
            return part.get("refusal")
    return None


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]


class TemplateOptions(LenientBody):
    """How the prompt that a chat template makes of messages ends."""

    add_generation_prompt: Annotated[
        StrictBool | None,
        Field(description="end with the assistant's turn begun; true unless the last message goes on"),
    ] = None
    continue_final_message: Annotated[StrictBool, Field(description="leave the last message open, to go on in it")] = (
        False
    )

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise field_error("continue_final_message", "goes without add_generation_prompt; set one of them")
        return self


class ChatBody(ScoredBody, TemplateOptions):
    """``POST /v1/chat/completions``."""

    messages: Messages
    add_special_tokens: Annotated[Literal[False], Field(description="the template writes them")] = False
    max_completion_tokens: TokenCount | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @property
    def wanted(self) -> int | None:
        """``max_completion_tokens`` first: it is the name that clients have come to use. All that fits by default."""
        wanted = self.max_completion_tokens if self.max_completion_tokens is not None else super().wanted
        return -1 if wanted is None else wanted

    @property
    def alternatives(self) -> int | None:
        """``top_logprobs`` counts the alternatives where ``logprobs`` is on."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs to be true")
        return self
