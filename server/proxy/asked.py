"""What a client asks of the other server: what is passed on, and what of it the client itself sent as text.

Most fields are not ours and go on as they are. What would bring an answer that cannot be followed whole is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from server.api.inference.bodies.fields import MAX_CHOICES, ModelName
from server.api.inference.bodies.generation import UnbindOptions
from server.errors import field_error, invalid
from unbind_core.guard.escapes import Unescaped
from unbind_core.guard.sent import Sent

MOST_PROMPTS = 1024
# field -> the values with which an answer can be followed
_REFUSED: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (None,),
    "return_hidden_states": (None, False),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "detokenize": (None, True),
}
_AS_IDS = "return_tokens_as_token_ids"
_IDS = ("return_token_ids", _AS_IDS)
_OF_JSON = (
    *("response_format", "structured_outputs", "json_schema", "grammar", "guided_json", "guided_grammar"),
    *("regex", "ebnf", "structural_tag", "guided_regex"),
    *("tools", "functions"),  # a server that does not know how its model writes calls leaves them in the text
)


class Asked(BaseModel):
    """The fields that this server reads; all others are passed on."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    model: ModelName = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None
    stop: Any = None
    unbind: UnbindOptions | None = None

    @model_validator(mode="after")
    def _can_be_followed(self) -> Self:
        more = self.model_extra or {}
        for field, harmless in _REFUSED.items():
            if field in more and more[field] not in harmless:
                raise field_error(field, "brings an answer that the guard cannot follow; leave it out")
        for field in _IDS:
            if more.get(field) and (why := self._apart(field)):
                raise field_error(field, f"{why}; leave one of them out")
        return self

    def _apart(self, field: str) -> str:
        """Why an answer could tell by ids what no text of it does; "" where it cannot."""
        if self.stop:  # in a stream they come before the text as well
            return "with stop, ids hold the whole token in which the text that the guard follows is cut"
        if field == _AS_IDS and (self.model_extra or {}).get("logprobs"):
            return "of the alternatives that logprobs bring, the guard follows texts and no ids"
        return ""

    @property
    def streamed(self) -> bool:
        """Whether the answer comes in parts."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with its token counts."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def escaped(self) -> bool:
        """Whether the answer's content is JSON, or may be."""
        return any((self.model_extra or {}).get(field) not in (None, {}, [], {"type": "text"}) for field in _OF_JSON)

    @property
    def answers(self) -> int:
        """How many choices there can be."""
        return self.n or 1

    def passed_on(self, model: str | None) -> bytes:
        """The body for the other server, in the one form in which it was read. Raises ApiError 400."""
        body = self.model_dump(exclude_unset=True, exclude={"unbind", "model"})
        if model is not None:
            body["model"] = model
        try:
            return json.dumps(body, allow_nan=False).encode()
        except ValueError:
            raise invalid("the body holds a number that is none in JSON (NaN or Infinity)") from None

    def sent(self) -> Callable[[int], Sent]:
        """By the index of a choice every text that the client sent for it: it may come back."""
        everything = Sent(self._texts)
        return lambda _: everything

    def _texts(self, *left_out: str) -> str:
        body = self.model_dump(exclude={"unbind", "model", *left_out}, exclude_none=True)
        return _joined(body)


class AskedChat(Asked):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]

    def _apart(self, field: str) -> str:
        """A server takes calls and what was thought out of the text, and may leave both out of its answer: the ids hold them."""
        more = self.model_extra or {}
        if more.get("tools") or more.get("functions") or more.get("include_reasoning") not in (None, True):
            return "ids hold what the answer's text may leave out: calls that are none, and what was thought"
        return super()._apart(field)


class AskedCompletion(Asked):
    """``POST /v1/completions``."""

    prompt: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]]

    @property
    def prompts(self) -> list[Any]:
        """Each prompt, as text or ids."""
        several = isinstance(self.prompt, list) and not all(isinstance(item, int) for item in self.prompt)
        return list(self.prompt) if several else [self.prompt]

    @model_validator(mode="after")
    def _few(self) -> Self:
        if not self.prompt and self.prompt != "":
            raise field_error("prompt", "must not be an empty list")
        if len(self.prompts) > MOST_PROMPTS:
            raise field_error("prompt", f"must not hold more than {MOST_PROMPTS} prompts")
        return self

    @property
    def answers(self) -> int:
        """As many for each prompt."""
        return super().answers * len(self.prompts)

    def sent(self) -> Callable[[int], Sent]:
        """The choice's own prompt, beside what all share; of ids nobody here knows the text."""
        shared, each = Sent(partial(self._texts, "prompt")), super().answers
        prompts = [Sent(partial(_joined, prompt), shared) for prompt in self.prompts]
        return lambda index: prompts[index // each]


def _joined(value: Any) -> str:
    return "\n".join(_strings(value))


def _strings(value: Any) -> Iterator[str]:
    """Every text in it; where it may be JSON, also as what its strings mean."""
    if isinstance(value, str):
        if "\\" in value:
            yield Unescaped().read(value)
        yield value
    else:
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from _strings(inner)
