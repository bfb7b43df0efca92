"""What the model's processes tell of gates while answers are made: where they are open, and by how much.

Workers push it before the tokens of a step come; whoever needs it for a token waits here for that token's position.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from server.engine.vllm.sockets import socket_folder
from unbind_core.applying.looks import Look, together

PATIENCE_SECONDS = 60.0  # for what was sent before the token that waits for it


@dataclass
class Told:
    """Of one leg: by stage of the model, positions below this one are known; the first at which a gate was open; the activations at
    the last position of each pass.
    """

    known: dict[int, int] = field(default_factory=dict)
    opened: int | None = None
    activations: dict[int, dict[str, float]] = field(default_factory=dict)


class GateReports:
    """Listens on a socket of its own; used on one event loop."""

    def __init__(self) -> None:
        self._folder = socket_folder()
        self.folder = Path(self._folder.name)  # until ``close``
        self.address = f"ipc://{self.folder / 'gates'}"
        self.stages: frozenset[int] = frozenset()  # of the model, as they name themselves
        self._legs: dict[str, Told] = {}
        self._news = asyncio.Condition()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(self.address)
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    def watch(self, leg: str) -> None:
        """Keep what is told of this leg."""
        self._legs[leg] = Told()

    def forget(self, leg: str) -> None:
        """No longer."""
        self._legs.pop(leg, None)

    async def until(self, leg: str, position: int) -> Told:
        """What is known once all stages have computed ``position``. Raises TimeoutError."""
        told = self._legs[leg]

        def known() -> bool:
            return all(told.known.get(stage, 0) > position for stage in self.stages)

        if not known():
            async with asyncio.timeout(PATIENCE_SECONDS), self._news:
                await self._news.wait_for(known)
        return told

    async def _listen(self) -> None:
        while True:
            stage, legs = await self._socket.recv_json()
            for leg, start, count, first, activations in legs:
                if (told := self._legs.get(leg)) is not None:
                    self._take(told, stage, start, count, first, activations)
            async with self._news:
                self._news.notify_all()

    @staticmethod
    def _take(told: Told, stage: int, start: int, count: int, first: int, activations: Mapping[str, float]) -> None:
        told.known[stage] = max(told.known.get(stage, 0), start + count)
        if first >= 0:
            told.opened = start + first if told.opened is None else min(told.opened, start + first)
        told.activations.setdefault(start + count - 1, {}).update(activations)

    async def close(self) -> None:
        """Listen no more."""
        self._listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listening
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()


def merged_looks(told: list[dict[str, Any]]) -> dict[str, Look]:
    """How near gates came, in the same way."""
    found: dict[str, Look] = {}
    for rank in told:
        if rank["tells"]:
            found = together(found, {key: Look(tuple(look[0]), *look[1:]) for key, look in rank["looks"].items()})
    return found


def merged(counts: list[dict[str, Any]]) -> dict[str, dict[str, tuple[int, int]]]:
    """Counts by key and phase from those of all ranks: of ranks that compute the same one tells."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for rank in counts:
        if not rank["tells"]:
            continue
        for key, phases in rank["counts"].items():
            own = found.setdefault(key, {})
            for phase, (evaluated, opened) in phases.items():
                before = own.get(phase, (0, 0))
                own[phase] = (before[0] + evaluated, before[1] + opened)
    return found
