"""Who computes what in the next step. Deques and integers only: no tensor, so it is tested in milliseconds.

A request waits, gets a slot, prefills in chunks, then joins the decode batch until it is finished.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from server.engine.request import Flight, Status


class QueueFull(Exception):
    """No room in the admission queue; the caller should come back later."""


class PromptTooLong(Exception):
    """The prompt, or the prompt with its answer, does not fit the slots; the message says by how many tokens."""


@dataclass(frozen=True)
class Chunk:
    """Prompt positions ``start`` .. ``start + count - 1`` of one request, to be prefilled in this step."""

    flight: Flight
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether this chunk ends the prompt, so that its last state predicts the first new token."""
        return self.start + self.count == len(self.flight.prompt)


@dataclass(frozen=True)
class Plan:
    """One step: the prompt chunks to prefill and the running requests, each one token further."""

    prefill: tuple[Chunk, ...]
    decode: tuple[Flight, ...]


class Scheduler:
    """First come, first served: ``slots`` slots of ``max_length`` positions, ``chunk_tokens`` prompt tokens a step."""

    def __init__(self, slots: int, max_length: int, queue_limit: int, chunk_tokens: int) -> None:
        self.max_length = max_length
        self.queue_limit = queue_limit
        self.chunk_tokens = chunk_tokens
        self.waiting: deque[Flight] = deque()
        self.slots: list[Flight | None] = [None] * slots

    @property
    def admitted(self) -> list[Flight]:
        """The requests that hold a slot, in slot order."""
        return [flight for flight in self.slots if flight is not None]

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.admitted

    def check_fits(self, prompt: int, max_tokens: int) -> None:
        """Raise PromptTooLong where prompt and answer together exceed a slot."""
        if prompt + max_tokens > self.max_length:
            raise PromptTooLong(
                f"prompt of {prompt} tokens and max_tokens {max_tokens} exceed the context of {self.max_length} tokens "
                f"by {prompt + max_tokens - self.max_length}; shorten the prompt or lower max_tokens"
            )

    def check_room(self, arriving: int = 0) -> None:
        """Raise QueueFull where ``arriving`` and waiting requests fill the queue and all free slots."""
        waiting = arriving + len(self.waiting)
        if waiting >= self.queue_limit + self.slots.count(None):
            raise QueueFull(
                f"{waiting} requests wait already, and the queue holds {self.queue_limit}; try again shortly"
            )

    def schedule(self) -> Plan:
        """Give free slots to waiting requests and share out this step's prompt tokens, oldest request first."""
        while self.waiting and None in self.slots:
            flight = self.waiting.popleft()
            flight.slot = self._choose_slot(flight)
            flight.status = Status.PREFILLING
            self.slots[flight.slot] = flight
        decode = tuple(flight for flight in self.admitted if flight.status is Status.RUNNING)
        left = self.chunk_tokens
        chunks = []
        for flight in self.admitted:
            if flight.status is Status.PREFILLING and left > 0:
                count = min(left, len(flight.prompt) - flight.computed)
                chunks.append(Chunk(flight, flight.computed, count))
                left -= count
        return Plan(tuple(chunks), decode)

    def _choose_slot(self, flight: Flight) -> int:
        """The lowest free slot, which keeps the decode batch dense; where a common prefix will be looked for."""
        return self.slots.index(None)

    def computed(self, plan: Plan) -> None:
        """The plan's keys and values are in their slots; prompts that are complete join the decode batch."""
        for chunk in plan.prefill:
            chunk.flight.computed = chunk.start + chunk.count
            if chunk.completes:
                chunk.flight.status = Status.RUNNING
        for flight in plan.decode:
            flight.computed += 1

    def finish(self, flight: Flight) -> None:
        """Take a request out, from the queue or its slot."""
        flight.status = Status.FINISHED
        if flight.slot >= 0:
            self.slots[flight.slot] = None
            flight.slot = -1
        elif flight in self.waiting:
            self.waiting.remove(flight)
