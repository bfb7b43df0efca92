"""Another server for the guard to stand in front of: a real one on loopback, which answers what a test has written for it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

EVENTS, JSON = "text/event-stream", "application/json"


@dataclass
class Script:
    """One answer: its parts as they are sent, each with the seconds waited before it. ``whole``: ended as HTTP wants it."""

    parts: Sequence[bytes | tuple[float, bytes]]
    kind: str = JSON
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    whole: bool = True


@dataclass
class Asked:
    """What came, and whether the answer was given up before its end."""

    path: str
    headers: dict[str, str]
    body: Any
    left: threading.Event = field(default_factory=threading.Event)


class Upstream:
    """Answers every call by ``script``."""

    def __init__(self) -> None:
        self.script = Script([b"{}"])
        self.asked: list[Asked] = []
        self.url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] != "http":
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        asked = Asked(scope["path"], headers, json.loads(raw) if raw else None)
        self.asked.append(asked)
        script = self.script
        given = {"content-type": script.kind, **script.headers}
        start = {"status": script.status, "headers": [(n.encode(), v.encode()) for n, v in given.items()]}
        await send({"type": "http.response.start", **start})
        gone = asyncio.create_task(self._gone(receive, asked))
        try:
            for part in script.parts:
                seconds, data = part if isinstance(part, tuple) else (0.0, part)
                await asyncio.wait({gone}, timeout=seconds)
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": data, "more_body": True})
                await asyncio.sleep(0)
            if script.whole:
                await send({"type": "http.response.body", "body": b""})
            else:
                raise ConnectionAbortedError("as the script says")
        finally:
            gone.cancel()

    @staticmethod
    async def _gone(receive: Receive, asked: Asked) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        asked.left.set()


@contextmanager
def upstream() -> Iterator[Upstream]:
    """A server, at whatever port is free."""
    made = Upstream()
    server = uvicorn.Server(uvicorn.Config(made, host="127.0.0.1", port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.005)
    made.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.should_exit = server.force_exit = True
        thread.join(30)


def event(document: Any) -> bytes:
    """An event as other servers write it, which is not how ours does."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def streamed(texts: Iterable[str], *, chat: bool = False, index: int = 0, **more: Any) -> list[bytes]:
    """The events of one choice, an end behind the last."""
    frame = {"id": "x-1", "object": "chunk", "created": 1, "model": "m", **more}

    def one(delta: dict[str, Any], reason: str | None = None) -> bytes:
        own = {"delta": delta} if chat else {"text": delta.get("content", "")}
        return event({**frame, "choices": [{"index": index, **own, "logprobs": None, "finish_reason": reason}]})

    return [*(one({"content": text}) for text in texts), one({}, "stop")]


def answered(*choices: dict[str, Any], **more: Any) -> bytes:
    """An answer at once."""
    return json.dumps(
        {"id": "x-1", "object": "y", "created": 1, "model": "m", "choices": list(choices), **more}
    ).encode()
