"""Messages of a chat, and how templates take them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictStr, field_validator

from server.api.inference.bodies.fields import Called, Text
from server.api.inference.bodies.unsupported import unsupported
from server.api.inference.written import rewritable


class CalledFunction(BaseModel):
    """What was called, with arguments as a text, which is JSON where the answer was not cut within them."""

    name: Called
    arguments: Text = ""

    @property
    def meant(self) -> dict[str, Any] | str:
        """The object that the arguments write; the text itself where they are none, or none that a template could write."""
        try:
            found = rewritable(self.arguments or "{}")
        except ValueError:
            return self.arguments
        return found if isinstance(found, dict) else self.arguments


class ToolCall(BaseModel):
    """A call that an earlier answer made."""

    id: StrictStr = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self, arguments_as_text: bool) -> dict[str, Any]:
        """The call as chat templates take it."""
        arguments = (self.function.arguments or "{}") if arguments_as_text else self.function.meant
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class Message(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[dict[str, Any]] | None = None
    refusal: Text | None = None
    name: StrictStr | None = None
    tool_call_id: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=512)] = None
    function_call: Any = None

    @field_validator("content")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            if not isinstance(_text_of(part), str):
                raise ValueError("parts must be of type text with their text; this server reads nothing else")
        return value

    @field_validator("function_call")
    @classmethod
    def _no_calls(cls, value: Any) -> Any:
        if value:
            raise unsupported("")
        return value

    @property
    def text(self) -> str:
        """Its text."""
        content = self.content if self.content is not None else self.refusal
        return "".join(_text_of(part) for part in content) if isinstance(content, list) else content or ""

    @property
    def size(self) -> int:
        """Characters of what a template may write of it."""
        own = len(self.text) + len(self.name or "") + len(self.tool_call_id or "")
        return own + sum(
            len(call.id) + len(call.function.name) + len(call.function.arguments) for call in self.tool_calls or ()
        )

    def plain(self, *, arguments_as_text: bool = False) -> dict[str, Any]:
        """The message as chat templates take it; ``developer`` is the newer name of ``system``.

        ``arguments_as_text``: for templates that write them as they are, where others make JSON of what they mean.
        """
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.role == "tool":
            found |= {"tool_call_id": self.tool_call_id or ""} | ({"name": self.name} if self.name else {})
        if self.tool_calls:
            found["tool_calls"] = [call.plain(arguments_as_text) for call in self.tool_calls]
        return found


def _text_of(part: dict[str, Any]) -> Any:
    """A part's text, which for a refusal stands under its own name; None for parts of other types."""
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return part.get("text")
        case "refusal":
            return part.get("refusal")
    return None


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]
