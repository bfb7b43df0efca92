"""Functions that a chat's answer may call, and how freely."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, StrictStr, model_validator

from server.api.inference.bodies.fields import JsonObject
from server.api.inference.bodies.generation import LenientBody
from server.errors import field_error

FunctionName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


def of_the_client(kind: str) -> BeforeValidator:
    """For the ``type`` of a tool: ``kind`` is a function of the client's own, all else what a server would carry out."""

    def check(given: Any) -> Any:
        if isinstance(given, str) and given != kind:
            told = (
                f"must be '{kind}': functions of the client's own can be called, and no other tools; leave this one out"
            )
            raise field_error("", told, "unsupported_parameter")
        return given

    return BeforeValidator(check)


FunctionType = Annotated[Literal["function"], of_the_client("function")]


class Function(BaseModel):
    """A function as OpenAI's clients describe it."""

    name: FunctionName
    description: StrictStr | None = None
    parameters: JsonObject | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    """One of ``tools``."""

    type: FunctionType
    function: Function

    @property
    def size(self) -> int:
        """About how many characters a template may write of it."""
        try:
            return len(self.function.description or "") + len(str(self.function.parameters))
        except RecursionError:
            return sys.maxsize


class Named(BaseModel):
    """A function's name."""

    name: FunctionName


class NamedFunction(BaseModel):
    """``tool_choice`` that names one function."""

    type: Literal["function"]
    function: Named


class ToolBody(LenientBody):
    """What a chat may say of functions."""

    tools: Annotated[list[Tool], Field(max_length=512)] = Field(default_factory=list)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction, Field(description="of tools; auto by default")
    ] = "auto"
    parallel_tool_calls: Annotated[StrictBool, Field(description="whether an answer may have several calls")] = True

    @model_validator(mode="after")
    def _there_are_such(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise field_error("tools", "has two functions of one name; rename one")
        chosen = self.tool_choice
        if chosen == "required" and not names:
            raise field_error("tool_choice", "asks for a call, and there are no tools; send tools, or leave it out")
        if isinstance(chosen, NamedFunction) and chosen.function.name not in names:
            raise field_error("tool_choice", "names a function that is not among tools; name one that is")
        return self

    @property
    def offered(self) -> Sequence[Tool]:
        """The functions that the answer may call."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def demanded(self) -> Sequence[Tool]:
        """Those of which one must be called."""
        if isinstance(self.tool_choice, NamedFunction):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else ()

    @property
    def several(self) -> bool:
        """Whether an answer may have more than one call: a function that is named is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedFunction)
