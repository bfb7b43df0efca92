"""Bodies of conversations: messages, how the prompt that is made of them ends, and the request for an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, StrictBool, StrictInt, field_validator, model_validator

from server.api.inference.bodies.dialects import ScoredBody
from server.api.inference.bodies.fields import Text, TokenCount
from server.api.inference.bodies.generation import LenientBody
from server.api.inference.bodies.unsupported import unsupported
from server.errors import field_error


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
