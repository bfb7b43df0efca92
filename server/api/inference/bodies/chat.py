"""Bodies of conversations: how the prompt that is made of messages ends, and the request for an answer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from server.api.inference.bodies.dialects import ScoredBody
from server.api.inference.bodies.forms import FormBody
from server.api.inference.bodies.generation import LenientBody
from server.api.inference.bodies.messages import Messages
from server.api.inference.bodies.tools import ToolBody
from server.errors import field_error


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


class ChatBody(ScoredBody, TemplateOptions, ToolBody, FormBody):
    """``POST /v1/chat/completions``."""

    messages: Messages
    add_special_tokens: Annotated[Literal[False], Field(description="the template writes them")] = False
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @property
    def wanted(self) -> int | None:
        """All that fits by default."""
        wanted = super().wanted
        return -1 if wanted is None else wanted

    @property
    def alternatives(self) -> int | None:
        """``top_logprobs`` counts the alternatives where ``logprobs`` is on."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs to be true")
        return self
