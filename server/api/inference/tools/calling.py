"""What a chat asks of calls: which format its model writes them in, what the grammar demands, and what the answers then say."""

from __future__ import annotations

import copy
import json
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from server.api.inference.bodies.chat import ChatBody
from server.api.inference.bodies.forms import Wanted
from server.api.inference.bodies.tools import Tool, ToolBody
from server.api.inference.tools.formats import ToolFormat, format_of, lark, shown_tokens, template_of
from server.api.inference.tools.reading import Argued, Begun, Event, Reader, Said
from server.engine.grammars import Form, GrammarError, check_length, spaced
from server.errors import invalid
from server.service import Service
from unbind_core.guard.escapes import AS_JSON, Escapes, Reading

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Calling:
    """How the answers of a chat call functions."""

    form: ToolFormat
    functions: tuple[str, ...]
    most: int | None
    special: dict[str, int]

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens that are part of the text, as calls are found by them."""
        return frozenset(self.special.values())

    def speech(self) -> Speech:
        """A new answer."""
        return Speech(self._reader(), self.form.id_length)

    @property
    def readings(self) -> tuple[Callable[[], Reading], ...]:
        """See ``GenerationRequest``. Markers and calls are no content: what stands on either side of one is told as one text.
        Arguments that are a string of JSON are told as what it means, which is JSON itself.
        """
        content, arguments = (partial(self._told, kind) for kind in (Said, Argued))
        return (*AS_JSON, content, lambda: Escapes(content()), lambda: Escapes(arguments()))

    def _told(self, kind: type[Said | Argued]) -> Told:
        return Told(self._reader(), kind)

    def _reader(self) -> Reader:
        return Reader(self.form, self.functions, self.most)


class Told:
    """What a chat tells of an answer by one ``kind`` of event, as one text: a reading for its guards."""

    def __init__(self, reader: Reader, kind: type[Said | Argued]) -> None:
        self._reader, self._kind = reader, kind

    def take(self, text: str) -> str:
        """See ``Reading``."""
        return "".join(event.text for event in self._reader.push(text) if isinstance(event, self._kind))

    def fork(self) -> Told:
        """See ``Reading``."""
        return Told(self._reader.fork(), self._kind)


def calling_of(served: Service, body: ToolBody) -> Calling | None:
    """None where the body offers no functions. Raises ApiError 400 where the model calls none."""
    if not body.offered:
        return None
    tokenizer = served.loaded.tokenizer
    form = format_of(template_of(tokenizer), served.settings.tool_format)
    if form is None:
        raise invalid(
            "tools: this model's chat template takes no functions in a format that is known here; leave it out, or name the "
            "format in the setting tool_format",
            "tools",
            "unsupported_parameter",
        )
    names = tuple(tool.function.name for tool in body.offered)
    return Calling(form, names, None if body.several else 1, shown_tokens(tokenizer, form))


def wanted_form(body: ChatBody, calling: Calling | None) -> Wanted | None:
    """What the answer must look like: what the body says of it, and a call where one is demanded. Raises ApiError."""
    wanted = body.wanted_form
    if calling is None or (wanted is None and not body.demanded):
        return wanted
    if wanted is not None and wanted.form.kind != "json":
        raise invalid(f"{wanted.field}: does not go with tools; leave one of them out", wanted.field)
    field, or_answer, tools = "tools", None, body.demanded or body.offered
    try:
        # asked first: here others wait
        check_length(sum(len(json.dumps(tool.function.parameters or {})) for tool in tools))
        functions = [(tool.function.name, _schema(tool)) for tool in tools]
        if wanted is not None and not body.demanded:
            field = wanted.field
            check_length(len(wanted.form.text))
            or_answer = spaced(json.loads(wanted.form.text), wanted.form.lenient)
        text = lark(calling.form, functions, calling.special, several=body.several, or_answer=or_answer)
    except GrammarError as error:
        raise invalid(f"{field}: {error}", field, "invalid_grammar") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"{field}: is not understood: {error}", field, "invalid_grammar") from None
    return Wanted(Form("calls", text), "tools")


def _schema(tool: Tool) -> dict[str, Any]:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    found = tool.function.parameters or nothing
    return spaced({"type": "object", **found}, not tool.function.strict)


@dataclass
class Speech:
    """One answer as a chat tells it: its content and its calls."""

    reader: Reader | None = None
    id_length: int = 24
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def deltas(self, text: str, reason: str | None = None) -> list[dict[str, Any]]:
        """What the next piece of the answer's text says, as the deltas of a stream; ``reason``: why none follows."""
        if self.reader is None:
            self.content += text
            return [{"content": text}] if text else []
        events = self.reader.push(text) if text else []
        events += self.reader.flush(cut=reason != "stop") if reason else []
        return [self._delta(event) for event in events]

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Said(text):
                self.content += text
                return {"content": text}
            case Begun(index, name):
                call = {"id": self._id(), "type": "function", "function": {"name": name, "arguments": ""}}
                self.calls.append(call)
                return {"tool_calls": [{"index": index, **copy.deepcopy(call)}]}
            case Argued(index, text):
                self.calls[index]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _id(self) -> str:
        """Mistral's templates take nine letters and nothing else."""
        made = "".join(secrets.choice(_LETTERS) for _ in range(self.id_length))
        return made if self.id_length < 24 else f"call_{made}"

    @property
    def halved(self) -> bool:
        """Whether the answer ends within a call, as where a stop string or a module ended it there."""
        return self.reader is not None and self.reader.within

    def reason(self, reason: str) -> str:
        """Why the answer ended, with its calls in mind: half a call is none to carry out."""
        return "tool_calls" if self.calls and reason == "stop" and not self.halved else reason

    @property
    def message(self) -> dict[str, Any]:
        """The whole answer."""
        said = {"role": "assistant", "content": self.content, "refusal": None}
        return said | {"content": self.content or None, "tool_calls": self.calls} if self.calls else said
