"""``POST /v1/responses``: a chat in the shape of OpenAI's Responses, whole or as their events, and how many tokens its input is.
Nothing is kept of it.

The chat is made and answered by what ``/v1/chat/completions`` uses; here are the names of it alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from server.api.caller import inference
from server.api.inference.answers import STREAMED, EventStream, named_bytes, whole
from server.api.inference.bodies.conversation import named_as
from server.api.inference.bodies.responses import NAMES, ResponsesBody
from server.api.inference.call import Admitted
from server.api.inference.chat import begun, length
from server.api.inference.generation import Generation, Result
from server.api.inference.logprobs import chat_logprobs
from server.api.inference.tools.calling import Calling, Speech
from server.api.models import check_model
from server.engine.request import TokenLogprob
from server.errors import ApiError
from server.service import Service, service

router = APIRouter(tags=["chat"])
Event = dict[str, Any]


@router.post("/v1/responses", responses=STREAMED)
@router.post("/responses", include_in_schema=False)
async def respond(body: ResponsesBody, call: Admitted) -> Response:
    """Answer the input; modules are named as in completions."""
    with named_as(NAMES):
        generation, calling = await begun(call, body.chat())
    answering = _Answering(generation, body, calling)
    if body.stream:
        return EventStream(generation, answering.events(), done=b"", encode=named_bytes)
    return await whole(call.request, generation, answering.whole)


@router.post("/v1/responses/input_tokens", dependencies=[Depends(inference)])
@router.post("/responses/input_tokens", dependencies=[Depends(inference)], include_in_schema=False)
async def count(body: ResponsesBody, served: Annotated[Service, Depends(service)]) -> dict[str, str | int]:
    """How many tokens the input is as a prompt, instructions and tools included."""
    check_model(served, body.model)
    with named_as(NAMES):
        return {"object": "response.input_tokens", "input_tokens": await length(served, body.chat())}


class _Answering:
    """One response on its way: what it says of itself, and the events by which its items come."""

    def __init__(self, generation: Generation, body: ResponsesBody, calling: Calling | None) -> None:
        self._generation, self._body = generation, body
        self._choice = generation.choices[0]
        self._speech = calling.speech() if calling else Speech()
        self._created = int(time.time())
        self._id = f"resp_{uuid.uuid4().hex}"
        self._sent = 0
        self._items: list[Event] = []
        self._open = ""  # the type of the last item while more of it may come
        self._text = ""  # of the last item, or its arguments
        self._logprobs: list[TokenLogprob | None] = []
        self._unsaid: list[TokenLogprob | None] = []  # of text that has not left yet

    def whole(self, results: list[Result]) -> Event:
        """The response at once: what the last event of a stream would say."""
        (result,) = results
        *_, last = (*self._taken(result.text, result.logprobs, result.reason), *self._ended(result.reason))
        return dict(last["response"])

    async def events(self) -> AsyncIterator[Event]:
        """The response as it comes. What fails before the first token is raised, what fails later told by ``response.failed``."""
        started = False
        try:
            async for _, delta in self._generation.merged():
                if not started:
                    started = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, response=self._response("in_progress"))
                for event in self._taken(delta.text, delta.logprobs, delta.finish_reason):
                    yield event
                if delta.finish_reason:
                    for event in self._ended(delta.finish_reason):
                        yield event
        except ApiError as error:
            if not started:
                raise
            yield self._event("response.failed", response=self._response("failed", error=error))

    def _taken(self, text: str, logprobs: Sequence[TokenLogprob | None], reason: str | None) -> Iterator[Event]:
        """What the next part of the answer says, in text and in calls."""
        self._unsaid += logprobs
        for part in self._speech.deltas(text, reason):
            if "content" in part:
                yield from self._said(part["content"])
            for call in part.get("tool_calls", ()):
                if "id" in call:
                    yield from self._called(call["id"], call["function"]["name"])
                if more := call["function"]["arguments"]:
                    self._text += more
                    yield self._of_item("response.function_call_arguments.delta", delta=more)

    def _said(self, text: str) -> Iterator[Event]:
        """Text, the message and its part begun before."""
        if self._open != "message":
            yield from self._closed("completed")
            message = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
            yield self._opened(message)
            yield self._of_item("response.content_part.added", content_index=0, part=self._part("", ()))
        self._text += text
        self._logprobs += self._unsaid
        scores, self._unsaid = self._scores(self._unsaid), []
        yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=scores)

    def _called(self, call_id: str, name: str) -> Iterator[Event]:
        """A call begins; the tokens that spell it have no place for scores."""
        yield from self._closed("completed")
        self._unsaid = []
        call = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call_id,
            "name": name,
            "arguments": "",
        }
        yield self._opened(call)

    def _opened(self, item: Event) -> Event:
        self._items.append({**item, "status": "in_progress"})
        self._open, self._text, self._logprobs = item["type"], "", []
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _closed(self, status: str) -> Iterator[Event]:
        """The ends of the item that is open, if one is."""
        if not self._open:
            return
        item = {**self._items[-1], "status": status}
        if self._open == "message":
            part = self._part(self._text, self._logprobs)
            text = {"text": self._text, "logprobs": part["logprobs"]}
            yield self._of_item("response.output_text.done", content_index=0, **text)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        else:
            item["arguments"] = self._text
            arguments = {"name": item["name"], "arguments": self._text}
            yield self._of_item("response.function_call_arguments.done", **arguments)
        self._open, self._items[-1] = "", item
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _ended(self, reason: str) -> Iterator[Event]:
        """The ends of the last item and of the response."""
        if not self._items or (self._unsaid and self._open == "message"):
            yield from self._said("")
        status = "completed" if reason == "stop" else "incomplete"
        yield from self._closed("incomplete" if self._speech.halved else status)
        response = self._response(status, reason, self._items)
        yield self._event(f"response.{status}", response={**response, **self._generation.reported(self._choice)})

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

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
            "completed_at": int(time.time()) if status == "completed" else None,
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
