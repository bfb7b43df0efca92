"""One question of a canary, by the way of a client's request: policy, prompt, engine and guards of the route ``/v1/completions``.

What makes it the server's own is a caller that no key stands for, and that nothing counts it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.types import Message

from server.api.caller import Caller
from server.api.inference.bodies.completions import CompletionBody
from server.api.inference.call import Call
from server.api.inference.completions import complete
from server.api.profiles import PROFILE_KEY
from server.policy import OFF
from server.registry.access import PROFILE_SCOPE
from server.registry.store import StoredModule
from server.service import Service

ITSELF = Caller(frozenset({"inference", "report"}))
TOKENS = 48  # of an answer
PROMPT_TOKENS = 512  # the last of a longer prompt
LOOK_SECONDS = 0.05  # between two looks at whether clients wait


class Displaced(Exception):
    """A client waited for the slot that the question had."""


@dataclass(frozen=True)
class Answer:
    """What came back, and what the module did to it: whether it applied, and at how many positions its gate was open.

    ``guarded``: its takedown's guard had to steer or end the answer.
    """

    text: str
    applied: bool
    opened: int
    guarded: bool


def room(served: Service) -> bool:
    """Whether a slot is free and nobody waits for one."""
    now = served.engine.stats()
    return not now.waiting and now.running < now.slots


async def ask(served: Service, stored: StoredModule, prompt: str) -> Answer:
    """What the module's answer to ``prompt`` is. It is named only where no policy applies it to this request anyway.

    Raises Displaced, and whatever a client would be refused with.
    """
    name, scope, limit = stored.module.name, stored.scope, served.settings.max_model_len
    profile = scope.removeprefix(PROFILE_SCOPE) if scope.startswith(PROFILE_SCOPE) else None
    named = [] if profile is not None or name in served.offer.demanded_of_all else [name]
    tokens = min(TOKENS, max(1, limit // 2))
    body = CompletionBody.model_validate(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "truncate_prompt_tokens": min(PROMPT_TOKENS, max(1, limit - tokens - 1)),
            "unbind": {"modules": named, "report": True},
        }
    )
    request = _request(served, profile)
    async with asyncio.timeout(served.settings.request_timeout):
        response = await complete(body, Call(request, served.for_itself(), ITSELF))
    if response.status_code != 200:
        raise Displaced
    return _read(json.loads(bytes(response.body)), name)


def _request(served: Service, profile: str | None) -> Request:
    async def until_displaced() -> Message:
        """A client that goes away as soon as another waits: its request is then ended, and its slot free."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = served.engine.stats()
            if now.waiting and now.running >= now.slots:
                return {"type": "http.disconnect"}

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    if profile is not None:
        scope[PROFILE_KEY] = profile
    return Request(scope, until_displaced)


def _read(body: dict[str, Any], name: str) -> Answer:
    choice = body["choices"][0]
    told = choice["unbind"]
    module = next((each for each in told["modules"] if each["name"] == name), None)
    guarded = name in told.get("guards", {}).get("bars", ()) or told.get("blocked", {}).get("module") == name
    return Answer(
        choice["text"], module is not None and module["strength"] > OFF, module["open"] if module else 0, guarded
    )
