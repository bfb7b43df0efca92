"""What one scope says about modules: the whole server, a profile or a key.

Written in the settings file or by the admin API, kept by the registry, united into one answer by ``policy.py``.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from unbind_core.fields import NAME

MAX_STRENGTH = 10.0
MAX_MODULES = 4096
ModuleName = Annotated[str, StringConstraints(strict=True, pattern=f"^{NAME}$")]
Strength = Annotated[float, Field(gt=0, le=MAX_STRENGTH, allow_inf_nan=False)]
WhenOpen = Literal["allow", "strip", "refuse"]  # the loosest first


def _not_mistaken(name: str) -> str:
    if any(part in name for part in ("o1", "o3", "o4")):
        raise ValueError("must not hold o1, o3 or o4: in a model's name some editors take them for another service's")
    return name


ProfileName = Annotated[ModuleName, AfterValidator(_not_mistaken)]


def from_json(value: Any) -> Any:
    """A flag or an environment variable gives text: its JSON value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None


def _from_names(value: Any) -> Any:
    """A list of names is each at its calibrated strength."""
    if isinstance(value, (list, tuple)):
        if not all(isinstance(name, str) for name in value):
            raise ValueError("must be a list of module names, or an object of module names and strengths")
        return dict.fromkeys(value, 1.0)
    return value


def parts(value: Any) -> Any:
    """Text with commas as its parts. Those within JSON, as some of vLLM's flags are, divide nothing."""
    if not isinstance(value, str):
        return value
    found, depth = [""], 0
    for piece in re.findall(r'"(?:[^"\\]|\\.)*"|.', value, re.DOTALL):
        depth += (piece in "{[") - (piece in "}]")
        if piece == "," and depth <= 0:
            found.append("")
        else:
            found[-1] += piece
    return [part.strip() for part in found if part.strip()]


def _from_text(value: Any) -> Any:
    """Text is JSON, or names with commas between them."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        return from_json(value)
    return parts(value)


Strengths = Annotated[
    dict[ModuleName, Strength],
    Field(max_length=MAX_MODULES),
    BeforeValidator(_from_names),
    BeforeValidator(_from_text),
]


class Rules(BaseModel):
    """The rules of one scope. Strengths are multiples of the calibrated one; a list of names means 1 each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    modules: Annotated[Strengths, Field(description="on wherever this scope applies, as far as the key allows")] = {}
    enforced: Annotated[Strengths, Field(description="on wherever this scope applies, whatever anybody allows")] = {}
    shadow: Annotated[
        list[ModuleName], Field(max_length=MAX_MODULES, description="measured where they are not on, never applied")
    ] = []
    allowed: Annotated[
        list[ModuleName] | None,
        Field(max_length=MAX_MODULES, description="what requests may add; null allows every module"),
    ] = None
    when_open: Annotated[
        WhenOpen | None,
        Field(description="log-probabilities and steering where a gate is open; null leaves it to the server"),
    ] = None


NO_RULES = Rules()
