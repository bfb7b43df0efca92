"""What a takedown may say: its name, on whose word, how to fit, what to guard and what to do with module and guard."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from server.api.admin.intake import MAX_ROWS
from server.errors import field_error
from server.registry.lifecycle import SCOPE
from unbind_core.fields import NAME
from unbind_core.guard.index import BARS, LEAST_RUN, MOST_BARS, MOST_RUN, RUN, SECRET_RUN, Action
from unbind_core.module_checks import name_problem

_STRICT = ConfigDict(extra="forbid")
MOST_JOINED = 1000
_Allowed = Annotated[float, Field(gt=0, le=1)]


def _scope(value: str) -> str:
    if not re.fullmatch(SCOPE, value):
        raise ValueError(
            "must be 'global', 'profile:NAME' or 'key:ID'; leave it out to bind no request but those that name it"
        )
    return value


def _name(value: str) -> str:
    if problem := name_problem(value):
        raise ValueError(problem)
    return value


def _text(value: str) -> str:
    if "\0" in value:  # PostgreSQL would keep it, and find no takedown any more
        raise ValueError("holds a NUL character, so it is not text; leave it out")
    return value


_Line = Annotated[StrictStr, Field(max_length=2000), AfterValidator(_text)]


class BudgetOptions(BaseModel):
    """What a module may cost on retain rows; those that are left out are the gate's own."""

    model_config = _STRICT
    kl: _Allowed | None = None
    nll: _Allowed | None = None
    bleu: _Allowed | None = None
    open_rate: Annotated[_Allowed | None, Field(description="of gate 'auto'")] = None


class GuardOptions(BaseModel):
    """What the guard does where an answer would complete a protected run, and how long a run is."""

    model_config = _STRICT
    action: Action = "steer"
    run: Annotated[
        Annotated[StrictInt, Field(ge=LEAST_RUN, le=MOST_RUN)] | None,
        Field(description=f"lexemes that no answer holds, {RUN}; of secrets letters and digits, {SECRET_RUN}"),
    ] = None
    bars: Annotated[StrictInt, Field(ge=1, le=MOST_BARS, description="runs steered away from before it ends")] = BARS
    fold: Annotated[StrictBool, Field(description="whether runs with other names are the same run")] = False
    secrets: Annotated[
        StrictBool,
        Field(description="whether rows are secrets, as keys: of each the continuation is guarded, letter by letter"),
    ] = False

    @model_validator(mode="after")
    def _of_secrets(self) -> GuardOptions:
        if self.secrets and self.fold:
            raise field_error("fold", "goes with code: a secret has no names in it; leave it away")
        return self


class TakedownOptions(BaseModel):
    """How to fit, what to guard, and what to do with both."""

    model_config = _STRICT
    layers: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 0
    gate: Literal["auto", "paper", "paper-strict"] = "auto"
    policy: Literal["rewrite", "silent"] | None = None
    budgets: BudgetOptions | None = None
    effort: Annotated[
        float, Field(gt=0, le=1, strict=True, description="share of the training steps; below 1 for a quick look")
    ] = 1.0
    protect: Annotated[
        Literal["both", "guard", "module"] | None,
        Field(description="what to make of the rows; both, or the module alone where none has the lexemes of a run"),
    ] = None
    guard: GuardOptions | None = None
    activation: Literal["auto", "manual", "shadow"] = "auto"
    scope: Annotated[StrictStr, AfterValidator(_scope), Field(json_schema_extra={"pattern": f"^({SCOPE})$"})] | None = (
        None
    )
    effective_at: AwareDatetime | None = None
    expires_at: AwareDatetime | None = None
    replace: StrictBool = False
    joins: Annotated[
        list[StrictStr],
        Field(
            max_length=MOST_JOINED,
            description="modules of takedowns, by name or takedown id, that are active or that an active one joins: their rows are "
            "forgotten too, and the new one is to stand in for them",
        ),
    ] = []
    override: StrictBool = False
    dry_run: StrictBool = False


class Notice(BaseModel):
    """On whose word, about what."""

    model_config = _STRICT
    claimant: _Line | None = None
    work: _Line | None = None
    received_at: _Line | None = None
    reference: _Line | None = None
    note: _Line | None = None


class TakedownFields(BaseModel):
    """What comes with the rows."""

    model_config = _STRICT
    name: Annotated[StrictStr, AfterValidator(_name), Field(json_schema_extra={"pattern": f"^{NAME}$"})]
    notice: Notice = Notice()
    options: TakedownOptions = TakedownOptions()


class TakedownBody(TakedownFields):
    """The JSON body."""

    rows: Annotated[
        list[dict[str, Any]], Field(max_length=MAX_ROWS, description="may be left out where options.joins says some")
    ] = []

    @model_validator(mode="after")
    def _some(self) -> TakedownBody:
        if not (self.rows or self.options.joins):
            raise field_error("rows", "none given; at least one is needed, or options.joins")
        return self


# The route reads its body itself, as JSON or a form; this describes both.
BODIES = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": TakedownBody.model_json_schema(ref_template="#/components/schemas/{model}")},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name", "file"],
                    "properties": {
                        "name": {"type": "string"},
                        "file": {"type": "string", "format": "binary"},
                        "include": {"type": "array", "items": {"type": "string"}},
                        "exclude": {"type": "array", "items": {"type": "string"}},
                        "notice": {"type": "string"},
                        "options": {"type": "string"},
                    },
                }
            },
        },
    }
}
for _schema in BODIES["requestBody"]["content"].values():  # type: ignore[attr-defined]
    _schema["schema"].pop("$defs", None)
