"""What every request for an answer may say: of its length, its sampling, its end and its modules.

Unknown fields are ignored, unless they would change the answer; null means "not given", as clients send it.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Self

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

from server.api.inference.bodies.fields import MAX_CHOICES, ModelName, Name, Prediction, TokenCount
from server.api.inference.bodies.unsupported import UNSUPPORTED, refuse_misplaced, refuse_unsupported
from server.engine.request import Sampling
from server.errors import field_error
from server.rules import MAX_MODULES, MAX_STRENGTH

log = logging.getLogger("unbind.http")
MAX_FIELDS = 1024  # of a body: each that nothing reads is looked at, while others wait
MAX_STOP_LENGTH = 16_384  # characters of all stop strings together
_noticed: set[tuple[str, str]] = set()


def drop_nulls(cls: type[BaseModel], body: Any) -> Any:
    """The body without its nulls. Fields that nothing reads are refused where they matter, else logged, each once."""
    if not isinstance(body, dict):
        return body
    if len(body) > MAX_FIELDS:
        raise field_error(
            "body", f"has {len(body)} fields; leave out what the API does not have, {MAX_FIELDS} may be sent"
        )
    aliases = (field.validation_alias for field in cls.model_fields.values())
    known = {str(name) for alias in aliases if isinstance(alias, AliasChoices) for name in alias.choices}
    known |= cls.model_fields.keys()
    refuse_unsupported(body, known)
    refuse_misplaced(body, known)
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

    model: ModelName = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
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
        """How many tokens were asked for under any of the names, that of newer chats first; -1 for as many as fit, None where
        nobody said.
        """
        names = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        given = next((count for count in names if count is not None), None)
        return self.options.num_predict if given is None and self.options else given

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
