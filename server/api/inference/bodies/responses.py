"""``POST /v1/responses``: OpenAI's Responses as far as nothing has to be kept between two of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
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
from server.api.inference.bodies.fields import Text, TokenCount
from server.api.inference.bodies.generation import GenerationBody
from server.api.inference.bodies.messages import CalledFunction
from server.api.inference.bodies.tools import Function, FunctionType, Named
from server.errors import field_error

LOGPROBS = "message.output_text.logprobs"
NOTHING_KEPT = "is not supported here: this server keeps no responses; send the whole conversation in input"
# a chat's field -> what it is called here
NAMES = {
    "messages": "input",
    "prompt": "input",
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
Id = Annotated[StrictStr, Field(min_length=1, max_length=256)]


def text_parts(value: Any) -> Any:
    """A content as it is or as a chat's parts. Raises ValueError for parts that are no text."""
    if isinstance(value, str):
        return value
    parts = []
    for part in value:
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(text, str):
            raise ValueError("parts must be of type input_text, output_text or refusal with their text")
        parts.append({"type": "text", "text": text})
    return parts


Content = Annotated[Text | Annotated[list[dict[str, Any]], Field(max_length=4096)], AfterValidator(text_parts)]


class MessageItem(BaseModel):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(CalledFunction):
    """A tool that the model called."""

    type: Literal["function_call"]
    call_id: Id


class OutputItem(BaseModel):
    """What the tool said."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Content


class ReasoningItem(BaseModel):
    """What a model thought before; no chat template takes it."""

    type: Literal["reasoning"]


def _kind(item: Any) -> str:
    """The item's type, in brackets: so errors leave it out of the field's path. A message need not say its own."""
    given = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return f"[{given}]"


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[OutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_parameter",
        custom_error_message="items must be of type message, function_call, function_call_output or reasoning",
    ),
]


class Format(BaseModel):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Id | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None

    @model_validator(mode="after")
    def _whole(self) -> Format:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise field_error("schema" if self.schema_ is None else "name", "is needed with the type json_schema")
        return self


class TextOptions(BaseModel):
    """``text``; ``verbosity`` is a hint and not read."""

    format: Format | None = None


class _OfFunctions(BaseModel):
    """There are no other tools here."""

    type: FunctionType


class FunctionTool(Function, _OfFunctions):  # in this order the type is looked at first
    """A tool of the client's own."""


class NamedTool(Named, _OfFunctions):
    """The one tool that must be called."""


class ResponsesBody(GenerationBody):
    """``POST /v1/responses``."""

    input: Annotated[
        Text | Annotated[list[Item], Field(min_length=1, max_length=4096)],
        Field(description="a text, or items of the conversation in order"),
    ]
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    n: Annotated[StrictInt, Field(ge=1, le=1, description="a response is one answer")] = 1
    include: Annotated[list[StrictStr], Field(max_length=64)] = Field(default_factory=list)
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] = 0
    text: TextOptions = TextOptions()
    tools: Annotated[list[FunctionTool], Field(max_length=512)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: StrictBool = True
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[StrictStr, Field(max_length=512)]], Field(max_length=16)
    ] = Field(default_factory=dict)
    store: Annotated[StrictBool, Field(description="nothing is kept, whatever it says")] = False
    truncation: Annotated[Literal["disabled"], Field(description="an input that does not fit is refused")] = "disabled"
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None

    @field_validator("previous_response_id", "conversation", "background", "prompt")
    @classmethod
    def _nothing_is_kept(cls, value: Any) -> Any:
        if value:
            raise ValueError(NOTHING_KEPT)
        return value

    @model_validator(mode="after")
    def _scores(self) -> ResponsesBody:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise field_error("top_logprobs", f"needs '{LOGPROBS}' in include")
        return self

    @property
    def wanted(self) -> int | None:
        """``max_output_tokens`` first."""
        return self.max_output_tokens if self.max_output_tokens is not None else super().wanted

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are to come beside the text."""
        return LOGPROBS in self.include

    def chat(self) -> ChatBody:
        """The chat that this is. Raises ValidationError."""
        chosen = self.tool_choice
        return as_chat(
            self,
            self._messages(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.scored or None,
            top_logprobs=self.top_logprobs if self.scored else None,
            tools=[{"type": "function", "function": _plain(tool, "type")} for tool in self.tools] or None,
            tool_choice={"type": "function", "function": {"name": chosen.name}}
            if isinstance(chosen, NamedTool)
            else chosen,
            parallel_tool_calls=self.parallel_tool_calls if self.tools else None,
            response_format=self._response_format(),
        )

    def _messages(self) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if self.instructions:
            made.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*made, {"role": "user", "content": self.input}]
        for item in self.input:
            match item:
                case MessageItem():
                    made.append({"role": item.role, "content": item.content})
                case CallItem():
                    if not (made and made[-1]["role"] == "assistant"):
                        made.append({"role": "assistant", "content": None})
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    made[-1].setdefault("tool_calls", []).append(call)
                case OutputItem():
                    made.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        return made

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.text.format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": _plain(wanted, "type")}


def _plain(part: BaseModel, *without: str) -> dict[str, Any]:
    return part.model_dump(by_alias=True, exclude_none=True, exclude=set(without))
