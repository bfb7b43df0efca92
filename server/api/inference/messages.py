"""``POST /v1/messages``: a chat in the shape of Anthropic's Messages, whole or as their events; and how many tokens one has.

The chat is made and answered by what ``/v1/chat/completions`` uses; here are the names of it alone.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from server.api.caller import inference
from server.api.inference.answers import STREAMED, EventStream, named_bytes, whole
from server.api.inference.bodies.anthropic import NAMES, CountBody, MessagesBody
from server.api.inference.bodies.conversation import named_as
from server.api.inference.call import Admitted
from server.api.inference.chat import begun, length
from server.api.inference.generation import Generation, Result
from server.api.inference.tools.calling import Calling, Speech
from server.api.inference.written import rewritable
from server.api.models import check_model
from server.service import Service, service

router = APIRouter(tags=["chat"])
Event = dict[str, Any]
REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_use"}
REFUSED = "the answer would have held text that a takedown protects"


@router.post("/v1/messages", responses=STREAMED)
async def say(body: MessagesBody, call: Admitted) -> Response:
    """Answer the messages; modules are named as in completions."""
    with named_as(NAMES):
        generation, calling = await begun(call, body.chat())
    answering = _Answering(generation, body, calling)
    if body.stream:
        return EventStream(generation, answering.events(), done=b"", encode=named_bytes)
    return await whole(call.request, generation, answering.whole)


@router.post("/v1/messages/count_tokens", dependencies=[Depends(inference)])
async def count(body: CountBody, served: Annotated[Service, Depends(service)]) -> dict[str, int]:
    """How many tokens these messages are as a prompt."""
    check_model(served, body.model)
    with named_as(NAMES):
        return {"input_tokens": await length(served, body.chat())}


class _Answering:
    """One message on its way: what it says of itself, and the events by which its blocks come."""

    def __init__(self, generation: Generation, body: MessagesBody, calling: Calling | None) -> None:
        self._generation, self._body = generation, body
        self._choice = generation.choices[0]
        self._speech = calling.speech() if calling else Speech()
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[Event] = []
        self._open = ""  # the type of the last block while more of it may come
        self._text = ""  # of the last block, or its input

    def whole(self, results: list[Result]) -> Event:
        """The message at once: what a stream would say in its parts."""
        (result,) = results
        for _ in (*self._taken(result.text, result.reason), *self._closed()):
            pass
        ended = self._reason(result.reason, result.stop_reason)
        return {**self._message(self._blocks), **ended, **self._generation.reported(self._choice)}

    async def events(self) -> AsyncIterator[Event]:
        """The message as it comes. What fails is raised."""
        started = False
        async for _, delta in self._generation.merged():
            if not started:  # not before, so that what fails until then is an error with its own status
                started = True
                yield {"type": "message_start", "message": self._message([])}
                yield {"type": "ping"}
            for event in self._taken(delta.text, delta.finish_reason):
                yield event
            if delta.finish_reason:
                for event in self._closed():
                    yield event
                ended = {"delta": self._reason(delta.finish_reason, delta.stop_reason), "usage": self._usage()}
                yield {"type": "message_delta", **ended, **self._generation.reported(self._choice)}
                yield {"type": "message_stop"}

    def _taken(self, text: str, reason: str | None) -> Iterator[Event]:
        """What the next part of the answer says, in text and in calls; of an answer that says nothing, an empty text."""
        for part in self._speech.deltas(text, reason):
            if "content" in part:
                if self._open != "text":
                    yield from self._opened({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part["content"]}, part["content"])
            for call in part.get("tool_calls", ()):
                if "id" in call:
                    block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                    yield from self._opened(block)
                if more := call["function"]["arguments"]:
                    yield self._delta({"type": "input_json_delta", "partial_json": more}, more)
        if reason and not self._blocks:
            yield from self._opened({"type": "text", "text": ""})

    def _opened(self, block: Event) -> Iterator[Event]:
        yield from self._closed()
        self._blocks.append(block)
        self._open, self._text = block["type"], ""
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: Event, text: str) -> Event:
        self._text += text
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _closed(self) -> Iterator[Event]:
        """The end of the block that is open, if one is."""
        if not self._open:
            return
        said = {"text": self._text} if self._open == "text" else {"input": _input(self._text)}
        self._blocks[-1], self._open = {**self._blocks[-1], **said}, ""
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _reason(self, reason: str, stopped_by: int | str | None) -> Event:
        """Why the message ended: of what ends one by request only strings have a name there."""
        found = REASONS[self._speech.reason(reason)]
        if found == "end_turn" and isinstance(stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        details = {"stop_details": {"type": "refusal", "category": None, "explanation": REFUSED}}
        return {"stop_reason": found, "stop_sequence": None, **(details if found == "refusal" else {})}

    def _message(self, content: list[Event]) -> Event:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model or self._generation.served.settings.served_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Tokens as Anthropic counts them: what was taken from a prefix is not among ``input_tokens``."""
        counted = self._generation.usage()
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counted["completion_tokens"],
        }


def _input(arguments: str) -> Event:
    """What a tool is called with; arguments that are no object, as where a limit ended them, as the text that they are."""
    try:
        found = rewritable(arguments or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
