"""What a slot of keys and values holds, and how far another request may take it over. Tokens and integers only."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.engine.request import Flight

if TYPE_CHECKING:
    from unbind_core.applying.passes import Forced


@dataclass(frozen=True)
class Kept:
    """What a slot holds: the tokens whose keys and values are valid, the modules they depend on, and for whom they
    were computed.

    ``watched``: whether it is known where gates opened; ``opened``: at which of the positions first, if at any. ``forced``: where
    gates were open whatever their detectors said. ``asked``: the length of the prompt; ``settled``: see ``Forcing``, of which
    prompts of other lengths take over no more. None where nothing reads for a guard.
    """

    tokens: array[int] = field(default_factory=lambda: array("q"))
    modules: tuple[tuple[str, float], ...] = ()
    since: int = -1  # on the scheduler's own clock; lower is older
    watched: bool = False
    opened: int | None = None
    owner: str = ""
    forced: tuple[Forced, ...] = ()
    asked: int = 0
    settled: int | None = None

    @classmethod
    def by(cls, flight: Flight, since: int = -1) -> Kept:
        """What the slot of a request holds so far."""
        request = flight.request
        known = (request.packed + array("q", flight.output))[: flight.computed]
        told = since, request.watches, flight.opened, request.owner, flight.forced
        return cls(known, request.modules.identity, *told, len(request.prompt), flight.settled)

    def common(self, flight: Flight, beyond: int = 0) -> int:
        """How many positions ``flight`` can take over, 0 where they are no more than ``beyond``; never its whole prompt, whose last
        state is still needed.
        """
        prompt, most = flight.request.packed, len(flight.prompt) - 1
        if min(len(self.tokens), most) <= beyond or self.tokens[beyond] != prompt[beyond]:
            return 0  # asked first, as it costs nothing
        if self.owner != flight.request.owner or self.modules != flight.request.modules.identity:
            return 0
        if flight.request.sampling.prompt_logprobs is not None:
            return 0
        if flight.request.watches and not self.watched:
            return 0
        if self.settled is not None and self.asked != len(prompt):
            most = min(most, self.settled)
        found = min(common_prefix(self.tokens, prompt), most, _alike(self.forced, flight.forced))
        return found if found > beyond else 0


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning, by bisection on slices, which compare much faster than items in a loop."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _alike(one: Sequence[Forced], other: Sequence[Forced]) -> int:
    """Up to which position the same gates were forced; as far as anybody goes where they are the same throughout."""
    ours, theirs = set(one) - set(other), set(other) - set(one)
    # Some differ in how long they go on alone.
    begun = {span._replace(end=0) for span in ours} & {span._replace(end=0) for span in theirs}
    return min(
        (span.end if span._replace(end=0) in begun else span.start for span in ours | theirs), default=sys.maxsize
    )


NOTHING_KEPT = Kept()
