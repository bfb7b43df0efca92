"""What an answer must look like, in the words of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, model_validator

from server.api.inference.bodies.fields import NO_NUMBER, Text
from server.api.inference.bodies.generation import LenientBody
from server.engine.grammars import Form
from server.errors import field_error

Schema = dict[str, Any] | bool
Choices = Annotated[tuple[Text, ...], Field(min_length=1, max_length=4096)]


class Wanted(NamedTuple):
    """A form, and the field that asked for it."""

    form: Form
    field: str


class NamedSchema(BaseModel):
    """``response_format.json_schema``."""

    model_config = ConfigDict(validate_by_name=True)
    name: StrictStr = ""
    document: Annotated[Schema, Field(alias="schema", description="every JSON object where left out")] = {
        "type": "object"
    }
    strict: Annotated[StrictBool | None, Field(description="refuse what of the schema cannot be kept")] = None


class ResponseFormat(BaseModel):
    """``response_format``."""

    model_config = ConfigDict(validate_by_name=True)
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None
    document: Annotated[Schema | None, Field(alias="schema", description="of json_object, as llama.cpp has it")] = None

    @model_validator(mode="after")
    def _with_its_schema(self) -> Self:
        if self.document is not None and self.type != "json_object":
            raise field_error("schema", "goes with the type json_object; with json_schema send {name, schema} there")
        if self.type == "json_schema" and self.json_schema is None:
            raise field_error("json_schema", "is what type json_schema needs; send {name, schema}")
        return self

    def wanted(self) -> Iterator[Wanted]:
        """None for text."""
        if self.type == "json_object" and self.document not in (None, {}):
            yield _json(self.document, "response_format.schema")
        elif self.type == "json_object":
            yield Wanted(Form("json", '{"type": "object"}'), "response_format")
        elif self.type == "json_schema" and self.json_schema is not None:
            strict = bool(self.json_schema.strict)
            yield _json(self.json_schema.document, "response_format.json_schema.schema", lenient=not strict)


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``: one of these. Strict, as a misspelt key would leave the answer free."""

    model_config = ConfigDict(extra="forbid", validate_by_name=True)
    document: Annotated[Schema | StrictStr | None, Field(alias="json")] = None
    json_object: StrictBool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Annotated[Text | None, Field(description="GBNF or Lark")] = None

    def wanted(self, at: str) -> Iterator[Wanted]:
        """The forms that are asked for."""
        yield from _forms(self.document, self.regex, self.choice, self.grammar, at + ".")
        if self.json_object:
            yield Wanted(Form("json", '{"type": "object"}'), f"{at}.json_object")


class FormBody(LenientBody):
    """A body that may say it in the words of OpenAI and vLLM."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | StrictStr | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[tuple[Text, ...], Field(max_length=4096)] = ()
    guided_grammar: Text | None = None

    @property
    def wanted_form(self) -> Wanted | None:
        """What the answer must look like, if the body says so."""
        return next(self._wanted(), None)

    def _wanted(self) -> Iterator[Wanted]:
        if self.response_format is not None:
            yield from self.response_format.wanted()
        if self.structured_outputs is not None:
            yield from self.structured_outputs.wanted("structured_outputs")
        yield from _forms(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, "guided_")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        _only_one(list(self._wanted()))
        return self


class NativeFormBody(LenientBody):
    """A body that may say it in llama.cpp's words."""

    grammar: Annotated[Text, Field(description="GBNF or Lark")] = ""
    json_schema: Schema | Literal[""] | None = None

    @property
    def wanted_form(self) -> Wanted | None:
        """What the answer must look like, if the body says so."""
        return next(self._wanted(), None)

    def _wanted(self) -> Iterator[Wanted]:
        yield from _forms(None, None, None, self.grammar, "")
        if self.json_schema is not None and self.json_schema != "":
            yield _json(self.json_schema, "json_schema")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        _only_one(list(self._wanted()))
        return self


def _only_one(found: list[Wanted]) -> None:
    if len(found) > 1:
        raise field_error(found[1].field, f"does not go with {found[0].field}; send one of them")


def _forms(
    document: Schema | str | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None, at: str
) -> Iterator[Wanted]:
    if document is not None and document != "":
        yield _json(document, f"{at}json")
    if regex:
        yield Wanted(Form("regex", regex), f"{at}regex")
    if choice:
        yield Wanted(Form("choice", json.dumps(choice)), f"{at}choice")
    if grammar:
        yield Wanted(Form("grammar", grammar), f"{at}grammar")


def _json(document: Schema | str, field: str, *, lenient: bool = False) -> Wanted:
    try:
        written = document if isinstance(document, str) else json.dumps(document, allow_nan=False)
    except ValueError:
        raise field_error(field, NO_NUMBER) from None
    except RecursionError:
        raise field_error(field, "is nested too deeply; send a simpler schema") from None
    return Wanted(Form("json", written, lenient), field)
