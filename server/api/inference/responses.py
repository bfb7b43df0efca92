"""``POST /v1/responses``: a chat in the shape of OpenAI's Responses, whole or as their events. Nothing is kept of it.

The chat is made and answered by what ``/v1/chat/completions`` uses; here are the names of it alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from server.api.inference.answers import EventStream, named_bytes, whole
from server.api.inference.bodies.conversation import named_as
from server.api.inference.bodies.responses import NAMES, ResponsesBody
from server.api.inference.call import Admitted
from server.api.inference.chat import begun
from server.api.inference.generation import Generation, Result
from server.api.inference.logprobs import chat_logprobs
from server.engine.request import TokenLogprob
from server.errors import ApiError

router = APIRouter(tags=["chat"])
Event = dict[str, Any]


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def respond(body: ResponsesBody, call: Admitted) -> Response:
    """Answer the input; modules are named as in completions."""
    with named_as(NAMES):
        generation = await begun(call, body.chat())
    answering = _Answering(generation, body)
    if body.stream:
        return EventStream(generation, answering.events(), done=b"", encode=named_bytes)
    return await whole(call.request, generation, answering.whole)


class _Answering:
    """One response on its way: what it says of itself, and the events by which its items come."""

    def __init__(self, generation: Generation, body: ResponsesBody) -> None:
        self._generation, self._body = generation, body
        self._choice = generation.choices[0]
        self._created = time.time()
        self._id = f"resp_{uuid.uuid4().hex}"
        self._sent = 0
        self._items: list[Event] = []
        self._open, self._text, self._logprobs = False, "", list[TokenLogprob | None]()

    def whole(self, results: list[Result]) -> Event:
        """The response at once."""
        (result,) = results
        status = "completed" if result.reason == "stop" else "incomplete"
        item = self._message(status, [self._part(result.text, result.logprobs)])
        return {**self._response(status, result.reason, [item]), **self._generation.reported(self._choice)}

    async def events(self) -> AsyncIterator[Event]:
        """The response as it comes. What fails before the first token is raised, what fails later told by ``response.failed``."""
        started = False
        try:
            async for _, delta in self._generation.merged():
                if not started:
                    started = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, response=self._response("in_progress"))
                if delta.text or delta.logprobs:
                    for event in self._said(delta.text, delta.logprobs):
                        yield event
                if delta.finish_reason:
                    for event in self._ended(delta.finish_reason):
                        yield event
        except ApiError as error:
            if not started:
                raise
            yield self._event("response.failed", response=self._response("failed", error=error))

    def _said(self, text: str, logprobs: Sequence[TokenLogprob | None]) -> Iterator[Event]:
        """Text, the message and its part begun before."""
        if not self._open:
            yield self._opened(self._message("in_progress", []))
            yield self._of_part("response.content_part.added", part=self._part("", ()))
        self._text += text
        self._logprobs += logprobs
        yield self._of_part("response.output_text.delta", delta=text, logprobs=self._scores(logprobs))

    def _opened(self, item: Event) -> Event:
        self._items.append(item)
        self._open, self._text, self._logprobs = True, "", []
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _closed(self, status: str) -> Iterator[Event]:
        """The ends of the item that is open."""
        part = self._part(self._text, self._logprobs)
        yield self._of_part("response.output_text.done", text=self._text, logprobs=part["logprobs"])
        yield self._of_part("response.content_part.done", part=part)
        self._items[-1] = {**self._items[-1], "status": status, "content": [part]}
        self._open = False
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _ended(self, reason: str) -> Iterator[Event]:
        """The ends of the last item and of the response, which says what an answer at once does."""
        if not self._items:
            yield from self._said("", ())
        status = "completed" if reason == "stop" else "incomplete"
        yield from self._closed(status)
        response = self._response(status, reason, self._items)
        yield self._event(f"response.{status}", response={**response, **self._generation.reported(self._choice)})

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **place, **fields)

    @staticmethod
    def _message(status: str, content: list[Event]) -> Event:
        return {
            "type": "message",
            "id": f"msg_{uuid.uuid4().hex}",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _part(self, text: str, logprobs: Sequence[TokenLogprob | None]) -> Event:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._scores(logprobs)}

    def _scores(self, logprobs: Sequence[TokenLogprob | None]) -> list[Any]:
        """In the chat's shape, which is the same."""
        if not self._body.scored:
            return []
        return list(chat_logprobs(self._generation.served.loaded.tokenizer, logprobs)["content"])

    def _response(
        self, status: str, reason: str = "stop", output: Sequence[Event] = (), *, error: ApiError | None = None
    ) -> Event:
        body = self._body
        over = {"length": "max_output_tokens"}.get(reason, reason)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": time.time() if status == "completed" else None,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": over} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": body.model or self._generation.served.settings.served_name,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}, **body.text.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": body.truncation,
            "background": False,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        counted = self._generation.usage()
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **counted["prompt_tokens_details"]},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }
