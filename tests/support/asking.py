"""Asking an engine without a server around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from server.engine.engine import Engine
from server.engine.request import Delta, GenerationRequest
from unbind_core.module import UnbindModule


@dataclass
class Answer:
    """One request's deltas, put together."""

    deltas: list[Delta]

    @property
    def whole(self) -> Delta:
        first, *others = self.deltas
        for delta in others:
            first = first.then(delta)
        return first

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.whole.tokens

    @property
    def text(self) -> str:
        return self.whole.text


def ask(engine: Engine, requests: Sequence[GenerationRequest], at_once: int = 64) -> list[Answer]:
    """The answers, so many requests at the same time."""

    async def one(request: GenerationRequest, turn: asyncio.Semaphore) -> Answer:
        async with turn:
            return Answer([delta async for delta in engine.generate(request)])

    async def everything() -> list[Answer]:
        turn = asyncio.Semaphore(at_once)
        return await asyncio.gather(*(one(request, turn) for request in requests))

    return asyncio.run(everything())


def sync(engine: Engine, modules: Sequence[UnbindModule]) -> None:
    engine.sync_modules([(module, module.digest) for module in modules]).result(120)
