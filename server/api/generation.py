"""From validated bodies to running requests and back: what completions and chat share.

Routes make ``Choice``s; everything is submitted before the answer starts, so that refusals are proper errors.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from server.api.schemas import DEFAULT_MAX_TOKENS, GenerationBody
from server.engine.pinned import PinnedSet
from server.engine.request import Delta, Flight, GenerationRequest
from server.errors import ApiError, error_body, invalid
from server.policy import HEADER
from server.service import Service


@dataclass
class Choice:
    """One answer of a call: its request in the engine and what has come of it. ``lead`` is text to echo."""

    index: int
    flight: Flight | None
    deltas: asyncio.Queue[Delta]
    lead: str = ""
    tokens: int = 0


class Generation:
    """The choices of one call."""

    def __init__(self, served: Service, prompts: Sequence[Sequence[int]], pinned: PinnedSet) -> None:
        self._served = served
        self.prompts = prompts
        self.pinned = pinned
        self.choices: list[Choice] = []
        self._started = time.perf_counter()

    def submit(self, body: GenerationBody, wanted: int | None, leads: Sequence[str]) -> None:
        """Submit ``body.n`` requests for each prompt, or none at all where one is refused."""
        limit = self._served.settings.max_model_len
        vocabulary = self._served.loaded.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        try:
            for prompt, lead in zip(self.prompts, leads, strict=True):
                if not prompt:
                    raise invalid("prompt: has no tokens; give at least one character", "prompt")
                if not all(0 <= token < vocabulary for token in prompt):
                    raise invalid(f"prompt: token ids must be from 0 to {vocabulary - 1}", "prompt")
                tokens = wanted if wanted is not None else max(1, min(DEFAULT_MAX_TOKENS, limit - len(prompt)))
                for _ in range(body.n):
                    index = len(self.choices)
                    request = GenerationRequest(tuple(prompt), body.sampling(tokens, index), self.pinned)
                    self.choices.append(self._choice(request, index, lead))
        except BaseException:
            self.cancel()
            raise
        self._served.telemetry.prompt_tokens.inc(sum(len(prompt) for prompt in self.prompts))
        for entry in self.pinned.entries:
            self._served.telemetry.module_requests.labels(entry.module.name).inc()

    def _choice(self, request: GenerationRequest, index: int, lead: str) -> Choice:
        if request.sampling.max_tokens == 0:  # an echo, or an editor warming up: nothing to compute
            self._served.engine.scheduler.check_fits(len(request.prompt), 0)
            deltas: asyncio.Queue[Delta] = asyncio.Queue()
            deltas.put_nowait(Delta("", (), "length"))
            return Choice(index, None, deltas, lead)
        flight, deltas = self._served.engine.submit(request)
        return Choice(index, flight, deltas, lead)

    def cancel(self) -> None:
        """Free what still runs."""
        for choice in self.choices:
            if choice.flight is not None:
                self._served.engine.cancel(choice.flight)

    async def deltas(self, choice: Choice) -> AsyncIterator[Delta]:
        """The deltas of one choice, the echoed text in front; raises ApiError where the engine failed it."""
        if choice.lead:
            yield Delta(choice.lead)
        while True:
            delta = await choice.deltas.get()
            if delta.error is not None:
                raise ApiError(500, delta.error, code="engine_error")
            if delta.tokens and not choice.tokens:
                self._served.telemetry.first_token.observe(time.perf_counter() - self._started)
            choice.tokens += len(delta.tokens)
            self._served.telemetry.generated_tokens.inc(len(delta.tokens))
            yield delta
            if delta.finish_reason is not None:
                return

    async def merged(self) -> AsyncIterator[tuple[int, Delta]]:
        """The deltas of all choices as they come, each with its choice's index."""
        arrived: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            try:
                async for delta in self.deltas(choice):
                    arrived.put_nowait((choice.index, delta))
                arrived.put_nowait(None)
            except ApiError as error:
                arrived.put_nowait(error)

        pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        try:
            left = len(pumps)
            while left:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()

    async def whole(self) -> list[tuple[str, str]]:
        """Text and finish reason of every choice, when all are done."""

        async def one(choice: Choice) -> tuple[str, str]:
            parts: list[str] = []
            reason = "stop"
            async for delta in self.deltas(choice):
                parts.append(delta.text)
                reason = delta.finish_reason or reason
            return "".join(parts), reason

        return list(await asyncio.gather(*(one(choice) for choice in self.choices)))

    def usage(self) -> dict[str, int]:
        """Token counts as the official client reads them."""
        prompt = sum(len(tokens) for tokens in self.prompts)
        made = sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    @property
    def headers(self) -> dict[str, str]:
        """Which modules this answer was made under."""
        return {HEADER: ",".join(self.pinned.labels)} if self.pinned.entries else {}


async def answer(
    request: Request, generation: Generation, shape: Callable[[list[tuple[str, str]]], dict[str, Any]]
) -> Response:
    """The whole answer as JSON; a client that goes away takes its requests with it."""
    work = asyncio.create_task(generation.whole())
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)
        return JSONResponse(shape(work.result()), headers=generation.headers)
    finally:
        generation.cancel()
        for task in (work, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events, ended by ``[DONE]``; whatever ends the connection frees the requests."""

    def __init__(self, generation: Generation, events: AsyncIterator[dict[str, Any]]) -> None:
        self._generation = generation
        headers = {**generation.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_encoded(events), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send, and put away."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


async def _encoded(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    except ApiError as error:
        body = error_body(error.status, error.message, error.param, error.code)
        yield b"data: " + json.dumps(body).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"
