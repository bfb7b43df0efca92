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
from server.api.inference.answers import EventStream, named_bytes, whole
from server.api.inference.bodies.anthropic import NAMES, CountBody, MessagesBody
from server.api.inference.bodies.conversation import named_as
from server.api.inference.call import Admitted
from server.api.inference.chat import begun
from server.api.inference.generation import Generation, Result
from server.api.inference.prompts import chat_prompt, size_of
from server.api.inference.tokens import most_tokens
from server.api.models import check_model
from server.service import Service, service

router = APIRouter(tags=["chat"])
Event = dict[str, Any]
REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}
REFUSED = "the answer would have held text that a takedown protects"


@router.post("/v1/messages")
async def say(body: MessagesBody, call: Admitted) -> Response:
    """Answer the messages; modules are named as in completions."""
    with named_as(NAMES):
        generation = await begun(call, body.chat())
    answering = _Answering(generation, body)
    if body.stream:
        return EventStream(generation, answering.events(), done=b"", encode=named_bytes)
    return await whole(call.request, generation, answering.whole)


@router.post("/v1/messages/count_tokens", dependencies=[Depends(inference)])
async def count(body: CountBody, served: Annotated[Service, Depends(service)]) -> dict[str, int]:
    """How many tokens these messages are as a prompt. They may be more than a request may have, as for ``/tokenize``."""
    check_model(served, body.model)
    with named_as(NAMES):
        chat = body.chat()
        size = size_of([message.plain["content"] for message in chat.messages])
        prompt = await served.encoder.run(size, chat_prompt, served, chat.messages, chat, most_tokens(served))
    return {"input_tokens": len(prompt.ids)}


class _Answering:
    """One message on its way: what it says of itself, and the events by which its blocks come."""

    def __init__(self, generation: Generation, body: MessagesBody) -> None:
        self._generation, self._body = generation, body
        self._choice = generation.choices[0]
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks = 0

    def whole(self, results: list[Result]) -> Event:
        """The message at once."""
        (result,) = results
        ended = _ended(result.reason, result.stop_reason)
        told = self._generation.reported(self._choice)
        return {**self._message([{"type": "text", "text": result.text}]), **ended, **told}

    async def events(self) -> AsyncIterator[Event]:
        """The message as it comes. What fails is raised."""
        started = False
        async for _, delta in self._generation.merged():
            if not started:  # not before, so that what fails until then is an error with its own status
                started = True
                yield {"type": "message_start", "message": self._message([])}
                yield {"type": "ping"}
            if delta.text:
                for event in self._said(delta.text):
                    yield event
            if delta.finish_reason:
                if not self._blocks:
                    for event in self._said(""):
                        yield event
                yield {"type": "content_block_stop", "index": self._blocks - 1}
                ended = {"delta": _ended(delta.finish_reason, delta.stop_reason), "usage": self._usage()}
                yield {"type": "message_delta", **ended, **self._generation.reported(self._choice)}
                yield {"type": "message_stop"}

    def _said(self, text: str) -> Iterator[Event]:
        """Text, its block begun before."""
        if not self._blocks:
            self._blocks = 1
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        yield {"type": "content_block_delta", "index": self._blocks - 1, "delta": {"type": "text_delta", "text": text}}

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


def _ended(reason: str, stopped_by: int | str | None) -> Event:
    """Why a message ended: of what ends one by request only strings have a name there."""
    if isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    refused = {"type": "refusal", "category": None, "explanation": REFUSED} if reason == "content_filter" else None
    return {"stop_reason": REASONS[reason], "stop_sequence": None, **({"stop_details": refused} if refused else {})}
