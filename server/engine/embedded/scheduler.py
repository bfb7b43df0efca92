"""Who computes what in the next step, and where. Deques and integers only: no tensor, so it is tested in milliseconds.

A request waits, gets a slot with what any slot already knows of its prompt, prefills the rest in chunks, then joins the
decode batch until it is finished.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from server.engine.embedded.kept import NOTHING_KEPT, Kept
from server.engine.engine import check_fits, check_queue
from server.engine.request import Flight, Status

LEAST_PREFIX = 8  # fewer common tokens are worth less than what the slot would forget
LEAST_PASS = 128  # prompt tokens; fewer are not worth a forward pass of their own
LARGEST = 0.7  # of the prompt tokens in one pass: more, and all threads have done it sooner than one lane's alone


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

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its part of the prompt."""
        return self.flight.prompt[self.start : self.start + self.count]

    @property
    def asked(self) -> int:
        """How many of its last positions' logits are needed: all where log-probabilities of the prompt are asked for."""
        return 1 if self.flight.request.sampling.prompt_logprobs is None else self.count


@dataclass(frozen=True)
class Plan:
    """One step: the prompt chunks to prefill and the running requests, each one token further. ``copies``: before that, in this
    order, requests whose ``cached_tokens`` are to be copied into their slot, and the slot that holds them.
    """

    prefill: tuple[Chunk, ...]
    decode: tuple[Flight, ...]
    copies: tuple[tuple[Flight, int], ...] = ()

    @property
    def flights(self) -> tuple[Flight, ...]:
        """Its requests."""
        return (*(chunk.flight for chunk in self.prefill), *self.decode)

    def passes(self, lanes: int = 1, least: int = LEAST_PASS, mixed: bool = True) -> list[Plan]:
        """The forward passes it takes: one, or where its prompts make equal work for ``lanes`` at a time, of ``least`` tokens each,
        that are done sooner side by side as many as that, the requests that go one token further in the smallest. Without
        ``mixed`` those and each chunk have a pass of their own.
        """
        if not mixed:
            decode = [Plan((), self.decode)] if self.decode else []
            return decode + [Plan((chunk,), ()) for chunk in self.prefill]
        most = max(least, math.ceil(_tokens(self.prefill) / lanes))
        shared: list[list[Chunk]] = [[]]
        for chunk in self.prefill:
            if shared[-1] and _tokens(shared[-1]) + chunk.count > most:
                shared.append([])
            shared[-1].append(chunk)
        smallest = min(shared, key=_tokens)
        plans = [Plan(tuple(chunks), self.decode if chunks is smallest else ()) for chunks in shared]
        return plans if side_by_side(plans) else [self] if self.flights else []


def _tokens(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.count for chunk in chunks)


def side_by_side(passes: Sequence[Plan]) -> bool:
    """Whether they are done sooner side by side, each by a share of the threads, than one after the other by all of them."""
    tokens = [_tokens(plan.prefill) for plan in passes if plan.prefill]
    return len(tokens) > 1 and max(tokens) <= LARGEST * sum(tokens)


class Scheduler:
    """First come, first served, but in turns of owners: ``slots`` slots of ``max_length`` positions, ``chunk_tokens`` prompt tokens
    a step; of these a request has a lane's share, and more where the others leave some.
    """

    def __init__(self, slots: int, max_length: int, queue_limit: int, chunk_tokens: int, lanes: int = 1) -> None:
        self.max_length = max_length
        self.queue_limit = queue_limit
        self.chunk_tokens = chunk_tokens
        self.lanes = lanes
        self.waiting: deque[Flight] = deque()
        self.slots: list[Flight | None] = [None] * slots
        self.kept: list[Kept] = [NOTHING_KEPT] * slots
        self._clock = itertools.count()

    @property
    def admitted(self) -> list[Flight]:
        """The requests that hold a slot, in slot order."""
        return [flight for flight in self.slots if flight is not None]

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not any(self.slots)

    @property
    def full(self) -> bool:
        """Somebody waits for a slot; who has one left to take waits for a prompt."""
        return bool(self.waiting) and None not in self.slots

    def check_fits(self, prompt: int, max_tokens: int) -> None:
        """Raise PromptTooLong where prompt and answer together exceed a slot."""
        check_fits(prompt, max_tokens, self.max_length)

    def check_room(self, arriving: Sequence[Flight] = (), owner: str = "") -> None:
        """Raise QueueFull where ``arriving`` and waiting requests fill the queue and all free slots, or ``owner``'s their share."""
        waiting, free = [*arriving, *self.waiting], self.slots.count(None)
        own = sum(flight.request.owner == owner for flight in waiting)
        check_queue(len(waiting) - free, own - free, self.queue_limit, owner)

    def _next(self) -> int | None:
        """Who of the queue gets a slot next: whose owner has the fewest, and of those who came first. None where all of them wait
        for their prompts to be computed for others.
        """
        held = Counter(flight.request.owner for flight in self.admitted)
        places = [place for place, flight in enumerate(self.waiting) if not self._is_computed_for(flight)]
        return min(places, key=lambda place: held[self.waiting[place].request.owner], default=None)

    def _is_computed_for(self, flight: Flight) -> bool:
        """Whether somebody else computes its very prompt, which it then takes over: so the answers of one call wait for the first,
        where computing the prompt for each would take longer than a forward pass.
        """
        prompt, most = flight.request.packed, len(flight.prompt) - 1
        return len(prompt) >= LEAST_PASS and any(
            other.computed < most  # else it can be taken over now
            and other.request.packed == prompt
            and replace(Kept.by(other), tokens=prompt).common(flight) == most
            for other in self.admitted
        )

    def schedule(self) -> Plan:
        """Give free slots to waiting requests and share out this step's prompt tokens, oldest request first."""
        copies: list[tuple[Flight, int]] = []
        while self.waiting and None in self.slots:
            if (place := self._next()) is None:
                break
            flight = self.waiting[place]  # and it waits until it has its slot: other threads ask whether all has ended
            flight.slot, source, common = self._choose_slot(flight)
            flight.computed = flight.cached_tokens = common
            opened = (self.slots[source] or self.kept[source]).opened
            if source != flight.slot:
                copies.append((flight, source))
            if flight.request.watches and opened is not None and opened < common:
                flight.opens(opened)
            flight.status = Status.PREFILLING
            flight.admitted = next(self._clock)
            self.slots[flight.slot] = flight
            self.kept[flight.slot] = NOTHING_KEPT
            del self.waiting[place]
        running: list[Flight] = []
        prefilling: list[Flight] = []
        for flight in self.admitted:
            (running if flight.status is Status.RUNNING else prefilling).append(flight)
        left = self.chunk_tokens
        wanted = sum(len(flight.prompt) - flight.computed for flight in prefilling)
        share, spare = max(1, left // self.lanes), left - wanted
        chunks: list[Chunk] = []
        for flight in sorted(prefilling, key=lambda flight: flight.admitted):
            if left > 0:
                own = len(flight.prompt) - flight.computed
                count = min(left, own, max(share, spare + own))
                chunks.append(Chunk(flight, flight.computed, count))
                left -= count
        return Plan(tuple(chunks), tuple(running), tuple(copies))

    def _choose_slot(self, flight: Flight) -> tuple[int, int, int]:
        """A free slot, the one whose beginning is taken over, which may be another and in use, and how long that is.

        Of slots with the longest common prefix of the same owner under the same modules the one that would forget the least. It is
        taken itself where it is free and would forget less than half. Else, and without a prefix worth having, the lowest empty
        slot is, or the one unused for longest: conversations that begin alike would put each other out.
        """
        known = [self.kept[slot] if holder is None else Kept.by(holder) for slot, holder in enumerate(self.slots)]
        free = [slot for slot, holder in enumerate(self.slots) if holder is None]
        oldest = min(free, key=lambda slot: known[slot].since)
        best, common = oldest, 0
        for slot in sorted(range(len(known)), key=lambda slot: (self.slots[slot] is not None, len(known[slot].tokens))):
            if longer := known[slot].common(flight, common):
                best, common = slot, longer
        if common < LEAST_PREFIX:
            return oldest, oldest, known[oldest].common(flight)
        if self.slots[best] is None and 2 * common >= len(known[best].tokens):
            return best, best, common
        return oldest, oldest if known[oldest].common(flight, common - 1) else best, common

    def computed(self, plan: Plan) -> None:
        """The plan's keys and values are in their slots; prompts that are complete join the decode batch."""
        for chunk in plan.prefill:
            chunk.flight.computed = chunk.start + chunk.count
            if chunk.completes:
                chunk.flight.status = Status.RUNNING
        for flight in plan.decode:
            flight.computed += 1

    def finish(self, flight: Flight, keep: bool = True) -> None:
        """Take a request out, from the queue or its slot. ``keep`` false: what its slot holds is not to be trusted. The
        server's own leave nothing, so that the next of them takes the same slot, not one that knows a client's conversation.
        """
        flight.status = Status.FINISHED
        if flight.slot >= 0:
            if keep and not flight.request.internal:
                self.kept[flight.slot] = Kept.by(flight, next(self._clock))
            self.slots[flight.slot] = None
            flight.slot = -1
        elif flight in self.waiting:
            self.waiting.remove(flight)
