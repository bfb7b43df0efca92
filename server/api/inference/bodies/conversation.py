"""What the bodies of other APIs say, as the chat that it is: one conversation, one set of tools, one form of the answer.

``ChatBody`` checks what is left to check; ``named_as`` gives what it refuses the names that the client knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from server.api.inference.bodies.chat import ChatBody
from server.api.inference.bodies.generation import GenerationBody
from server.engine.refusals import PromptTooLong
from server.errors import ApiError, translate

SYSTEM = ("system", "developer")


def as_chat(body: GenerationBody, messages: Sequence[Mapping[str, Any]], **fields: Any) -> ChatBody:
    """The chat that a body asks for: its own fields of length, sampling and modules, and these. Raises ValidationError."""
    shared = body.model_dump(include=set(GenerationBody.model_fields), exclude_unset=True)
    given = {name: value for name, value in fields.items() if value is not None}
    return ChatBody.model_validate({**shared, **given, "messages": one_system(messages)})


def one_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with those of the system that open them as one: most templates take no second."""
    leading = messages[: _opening(messages)]
    if len(leading) < 2:
        return [dict(message) for message in messages]
    parts: list[dict[str, Any]] = []
    for message in leading:
        content = message["content"]
        given = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        parts += [*([{"type": "text", "text": "\n\n"}] if parts else []), *given]
    return [{"role": "system", "content": parts}, *(dict(message) for message in messages[len(leading) :])]


def _opening(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many messages of the system stand at the beginning."""
    return next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM), len(messages))


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a chat's field under the name that the client sent it by. Raises ApiError."""
    try:
        yield
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise _renamed(translate(RequestValidationError(found)), names) from None
    except (ApiError, PromptTooLong) as error:
        raise _renamed(translate(error), names) from None


def _name_of(field: str, names: Mapping[str, str]) -> str:
    """A chat's field as the client knows it: without the objects that only a chat has, and the places of messages, which differ."""
    if re.match(r"messages\.\d", field):
        return names["messages"]
    field = field.replace(".function", "", 1)
    for own, theirs in names.items():
        if field == own or field.startswith(f"{own}."):
            return theirs + field.removeprefix(own)
    return field


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    field = error.param or ""
    renamed = _name_of(field, names)
    message = (
        error.message.replace(f"{field}:", f"{renamed}:", 1) if error.message.startswith(f"{field}:") else error.message
    )
    return ApiError(error.status, message, param=renamed or None, code=error.code, headers=error.headers)
