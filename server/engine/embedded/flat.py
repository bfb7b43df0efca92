"""The sequences of one forward pass, flat: their states follow each other, however many each has, and nothing pads them."""

from __future__ import annotations

from itertools import accumulate, chain

import torch
from torch import Tensor

from server.engine.embedded.scheduler import Plan
from server.engine.embedded.slots import Placement


class Flat:
    """S sequences of N states in all: prompt chunks, then requests one token further. The model sees [1,N], or [N,1] where no
    prompt is in the pass, as models need whose attention reads no slots in place.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        """Of one pass."""
        chunks, decode = plan.prefill, plan.decode
        self.device = device
        self.flights = [*(chunk.flight for chunk in chunks), *decode]
        self.starts = [*(chunk.start for chunk in chunks), *(flight.computed for flight in decode)]
        self.counts = [*(chunk.count for chunk in chunks), *([1] * len(decode))]
        self.ends = list(accumulate(self.counts))  # behind the last state of each, in the pass
        self.total = self.ends[-1]
        self.phase = "prefill" if chunks else "decode"
        self._chunks, self._decode = chunks, decode

    @property
    def shape(self) -> tuple[int, int]:
        """Of the pass as the model sees it."""
        return (1, self.total) if self._chunks else (self.total, 1)

    @property
    def parts(self) -> list[slice]:
        """The states of each sequence."""
        return [slice(end - count, end) for end, count in zip(self.ends, self.counts, strict=True)]

    @property
    def ids(self) -> Tensor:
        """int64, of the pass's shape."""
        ids = [
            *chain.from_iterable(chunk.tokens for chunk in self._chunks),
            *(flight.last_token for flight in self._decode),
        ]
        return torch.tensor(ids, device=self.device).view(self.shape)

    @property
    def wanted(self) -> list[int]:
        """The states whose logits are asked for."""
        asked = [*(chunk.asked for chunk in self._chunks), *([1] * len(self._decode))]
        return [state for end, count in zip(self.ends, asked, strict=True) for state in range(end - count, end)]

    @property
    def decoding(self) -> Tensor | None:
        """bool [N], where tokens are decoded beside prompts; None where nothing is."""
        if not self._chunks or not self._decode:
            return None
        return torch.arange(self.total, device=self.device) >= self.total - len(self._decode)

    def spread(self, values: Tensor) -> Tensor:
        """[N] from [S]: each sequence's for all of its states."""
        if self.total == len(values):
            return values
        return values.repeat_interleave(torch.tensor(self.counts, device=self.device), output_size=self.total)

    def placement(self, in_place: bool) -> Placement:
        """Where it lives in the slots."""
        starts = zip(self.starts, self.counts, strict=True)
        positions = torch.tensor([*chain.from_iterable(range(start, start + count) for start, count in starts)])
        slots = [flight.slot for flight in self.flights]
        return Placement.of(slots, self.starts, self.counts, positions.view(self.shape).to(self.device), in_place)
