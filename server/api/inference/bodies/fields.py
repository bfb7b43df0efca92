"""Kinds of fields that several bodies have, and their bounds. Numbers out of range are refused rather than bent."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StrictInt, StrictStr

DEFAULT_MAX_TOKENS = 128
MAX_CHOICES = 64
MAX_TOKENS = 1_000_000
Text = Annotated[StrictStr, Field(max_length=8_000_000)]
Name = Annotated[StrictStr, Field(min_length=1, max_length=200)]
ModelName = Annotated[
    Annotated[StrictStr, Field(max_length=200)] | None,
    AfterValidator(lambda name: name or None),  # llama.vim sends an empty one where none is set
]
Called = Annotated[Text, Field(min_length=1)]  # a function's name as a model wrote it, which may be none that there is
TokenCount = Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)]
Prediction = Annotated[StrictInt, Field(ge=-1, le=MAX_TOKENS)]  # -1: as much as fits
Time = Annotated[float, Field(ge=-1, le=86_400_000)]
NO_NUMBER = "holds NaN, Infinity or a number that no float holds, which is none in JSON; leave it out"


def _of_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        with suppress(RecursionError):  # what is nested too deeply is refused where it is looked into
            json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError(NO_NUMBER) from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_of_json)]  # written again, in a prompt or an answer
