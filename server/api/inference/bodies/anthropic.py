"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: conversations as Anthropic's clients send them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    field_validator,
    model_validator,
)

from server.api.inference.bodies.chat import ChatBody
from server.api.inference.bodies.conversation import as_chat
from server.api.inference.bodies.fields import Called, JsonObject, Text, TokenCount
from server.api.inference.bodies.generation import GenerationBody
from server.api.inference.bodies.tools import FunctionName, of_the_client
from server.errors import field_error

# a chat's field -> what it is called here
NAMES = {
    "messages": "messages",
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
Id = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class TextBlock(BaseModel):
    """A text; marks for a cache are not needed here and not read."""

    type: Literal["text"]
    text: Text

    @property
    def part(self) -> dict[str, Any]:
        """As a chat has it."""
        return {"type": "text", "text": self.text}


class ToolUseBlock(BaseModel):
    """A tool that the model called."""

    type: Literal["tool_use"]
    id: Id
    name: Called
    input: dict[str, Any]

    @property
    def call(self) -> dict[str, Any]:
        """As a chat has it."""
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


class ThinkingBlock(BaseModel):
    """What a model thought before; no chat template takes it."""

    type: Literal["thinking", "redacted_thinking"]


def _kind(block: Any) -> str:
    """The block's type, in brackets: so errors leave it out of the field's path."""
    return f"[{block.get('type') if isinstance(block, dict) else getattr(block, 'type', None)}]"


class ToolResultBlock(BaseModel):
    """What a tool said."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Text | list[TextBlock] = ""

    @property
    def message(self) -> dict[str, Any]:
        """As a chat has it."""
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": texts(self.content)}


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[ThinkingBlock, Tag("[redacted_thinking]")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_parameter",
        custom_error_message="blocks must be of type text, tool_use, tool_result or thinking",
    ),
]


def texts(content: str | list[Any]) -> str | list[dict[str, Any]]:
    """The texts of a content, as a chat has them."""
    return content if isinstance(content, str) else [block.part for block in content if isinstance(block, TextBlock)]


class Turn(BaseModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=4096)]

    @field_validator("content")
    @classmethod
    def _in_place(cls, value: Any, info: Any) -> Any:
        role = info.data.get("role")
        for block in value if isinstance(value, list) else ():
            if isinstance(block, ToolUseBlock) and role != "assistant":
                raise ValueError("blocks of type tool_use go with the role assistant")
            if isinstance(block, ToolResultBlock) and role != "user":
                raise ValueError("blocks of type tool_result go with the role user")
        return value

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As a chat has it: results of tools are messages of their own, before what the user says."""
        blocks = [] if isinstance(self.content, str) else self.content
        calls = [block.call for block in blocks if isinstance(block, ToolUseBlock)]
        results = [block.message for block in blocks if isinstance(block, ToolResultBlock)]
        said = texts(self.content)
        if results and not said:
            return results
        return [*results, {"role": self.role, "content": said, **({"tool_calls": calls} if calls else {})}]


class AnthropicTool(BaseModel):
    """A tool of the client's own; there are no others here."""

    type: Annotated[Literal["custom"], of_the_client("custom")] = "custom"
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject
    strict: StrictBool | None = None

    @property
    def function(self) -> dict[str, Any]:
        """As a chat has it."""
        told = {"description": self.description, "strict": self.strict}
        given = {name: value for name, value in told.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, "parameters": self.input_schema, **given}}


class ToolChoice(BaseModel):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: StrictBool = False

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise field_error("name", "goes with the type tool, and with no other")
        return self

    @property
    def chosen(self) -> Any:
        """As a chat has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class JsonFormat(BaseModel):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """``output_config``; ``effort`` is a hint and not read."""

    format: JsonFormat | None = None


class ConversationBody(GenerationBody):
    """What both routes read."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096)]
    system: Text | list[TextBlock] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=1, description="a message is one answer")] = 1
    stop: Annotated[
        list[StrictStr] | None,
        Field(max_length=1024, validation_alias=AliasChoices("stop_sequences", "stop")),
    ] = None
    tools: Annotated[list[AnthropicTool], Field(max_length=512)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig = OutputConfig()

    def chat(self) -> ChatBody:
        """The chat that this is. Raises ValidationError."""
        system = [{"role": "system", "content": texts(self.system)}] if self.system else []
        messages = [*system, *(message for turn in self.messages for message in turn.messages)]
        wanted, chosen = self.output_config.format, self.tool_choice
        alone = False if self.tools and chosen and chosen.disable_parallel_tool_use else None
        return as_chat(
            self,
            messages,
            continue_final_message=(messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]) or None,
            tools=[tool.function for tool in self.tools] or None,
            tool_choice=chosen.chosen if chosen else None,
            parallel_tool_calls=alone,
            response_format=wanted
            and {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema_, "strict": True}},
        )


class MessagesBody(ConversationBody):
    """``POST /v1/messages``."""

    max_tokens: TokenCount


class CountBody(ConversationBody):
    """``POST /v1/messages/count_tokens``."""
