"""What a caller asks of the engine, what it gets back, and the engine's own record of a request in flight.

API -> ``GenerationRequest`` -> ``Flight`` (scheduler, runner, sampler) -> ``Delta``s back to the API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from server.engine.pinned import NOTHING, PinnedSet

if TYPE_CHECKING:
    from server.engine.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Status(StrEnum):
    """Where a request is. Only the scheduler changes it."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0, else nucleus sampling; without a seed every call draws its own."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue. ``modules`` stays as it was pinned, whatever is loaded or unloaded meanwhile."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    modules: PinnedSet = NOTHING


@dataclass(frozen=True)
class Delta:
    """One step's worth of answer. ``error`` is set where the engine failed the request (finish_reason "error")."""

    text: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(eq=False)
class Flight:
    """A request in the engine. ``computed`` counts the positions whose keys and values are in the slot."""

    request: GenerationRequest
    text: TextStream
    deliver: Callable[[Delta], None]
    draw: Callable[[], float]  # uniform [0, 1) from the request's own generator
    status: Status = Status.WAITING
    slot: int = -1
    computed: int = 0
    output: list[int] = field(default_factory=list)
    cancelled: bool = False

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.request.prompt

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def last_token(self) -> int:
        """The newest token: the decode step's input."""
        return self.output[-1] if self.output else self.request.prompt[-1]
