"""Kinds of fields that several bodies have, and their bounds. Numbers out of range are refused rather than bent."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictInt, StrictStr

DEFAULT_MAX_TOKENS = 128
MAX_CHOICES = 64
MAX_TOKENS = 1_000_000
Text = Annotated[StrictStr, Field(max_length=8_000_000)]
Name = Annotated[StrictStr, Field(min_length=1, max_length=200)]
TokenCount = Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)]
Prediction = Annotated[StrictInt, Field(ge=-1, le=MAX_TOKENS)]  # -1: as much as fits
Time = Annotated[float, Field(ge=-1, le=86_400_000)]
