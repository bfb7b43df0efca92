"""Where the states of one forward pass stand in a memory of gates, whoever owns it: an engine's slots, a generation, pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

WHOLE_ROW = slice(None)


class Addresses(NamedTuple):
    """How a kernel finds the rows of N states that are each a sequence of its own, in a layer's ``memory`` int32 [rows,columns].

    State i is at position ``positions[i] + ahead``, int [N], and the row of a position p is 1 + ``tables[i, p // size]`` x ``size``
    + p mod ``size``, int [N,pages]; the one in front is row 0 where the memory is ``paged``, else the one before position 0's.
    """

    memory: Tensor
    positions: Tensor
    ahead: int
    tables: Tensor
    size: int
    paged: bool


class Places(ABC):
    """N states of S sequences, flat: those of a sequence follow each other, and the sequences too.

    A memory is rows of int32 columns at each layer. Every position of a sequence has its row, and the one in front of position 0
    reads as zeros. Every layer reads and writes at the same rows, so they are worked out once a pass.
    """

    def __init__(self, positions: Tensor, firsts: Tensor, starts: Tensor) -> None:
        """``positions`` int64 [N], each state's in its sequence; ``firsts`` int64 [S], where in the pass each sequence begins,
        rising from 0; ``starts`` int64 [S], the position of its first real state.
        """
        self.positions, self.firsts, self.starts = positions, firsts, starts
        self._behind: dict[tuple[tuple[int, int], ...], Tensor] = {}

    @abstractmethod
    def rows(self, positions: Tensor, sequences: Tensor | None) -> Tensor:
        """The memory's rows of ``positions`` int64 [n], -1 for the one in front, of ``sequences`` int64 [n]; or, where
        that is None, of [...,S], one of each.
        """

    @abstractmethod
    def read(self, layer: int, rows: Tensor, width: int, part: slice = WHOLE_ROW) -> Tensor:
        """int32 [n,columns] of ``rows`` int64 [n], or that ``part`` of their columns; ``width``: the columns that the layer uses in
        all, there may be more.
        """

    @abstractmethod
    def write(self, layer: int, columns: Tensor | slice, values: Tensor) -> None:
        """Keep int32 ``values`` [N,columns] at the states' own rows."""

    def addresses(self, layer: int, width: int) -> Addresses | None:
        """Where every state is a sequence of its own, what a kernel needs to find its rows; None where none can. ``width`` as in
        :meth:`read`.
        """
        return None

    @property
    def alone(self) -> bool:
        """Whether every state is a sequence of its own, as in decoding."""
        return len(self.firsts) == len(self.positions)

    @cached_property
    def sequences(self) -> Tensor | None:
        """Whose each state is, int64 [N]; None where every state is a sequence of its own."""
        if self.alone:
            return None
        begins = torch.zeros_like(self.positions)
        begins[self.firsts[1:]] = 1
        return begins.cumsum(0)

    @cached_property
    def before(self) -> Tensor:
        """The row in front of each sequence's first state, int64 [S]."""
        return self.rows(self.starts - 1, None)

    @cached_property
    def here(self) -> Tensor:
        """The states' own rows, int64 [N]."""
        return self.rows(self.positions, self.sequences)

    def behind(self, lags: tuple[tuple[int, int], ...]) -> Tensor:
        """The rows so far behind each state, int64 [lags x N], of (lag, first) pairs: none before the one in front of position
        ``first``, nor behind the state's own.
        """
        if lags not in self._behind:
            own, (far, least) = self.positions, _columns(lags, self.positions.device)
            wanted = torch.maximum(own - far, least)
            if any(first for _, first in lags):
                wanted = torch.minimum(own, wanted)
            sequences = self.sequences
            if sequences is None:
                self._behind[lags] = self.rows(wanted, None).reshape(-1)
            else:
                self._behind[lags] = self.rows(wanted.reshape(-1), sequences.repeat(len(lags)))
        return self._behind[lags]

    def summed(self, grains: Tensor, before: Tensor) -> Tensor:
        """Running sums of each sequence: ``grains`` int32 [N,K] added up on ``before`` [S,K]. They may wrap; differences do not."""
        if self.sequences is None:
            return grains.add_(before)
        sums = grains.cumsum(0, dtype=torch.int32)
        if len(before) == 1:
            return sums.add_(before)
        others = sums.index_select(0, (self.firsts - 1).clamp_(min=0))  # what the sequences before have added
        others[0] = 0
        return sums.add_((before - others).index_select(0, self.sequences))

    def held(self, opens: Tensor, closes: Tensor, before: Tensor) -> Tensor:
        """The state of two-threshold gates, open from a state that opens to one that closes: bool [N,M], ``before`` [S,M]."""
        if self.sequences is None:
            return opens | (before & ~closes)
        step = torch.arange(1, len(opens) + 1, device=opens.device)[:, None]
        opened = torch.where(opens, step, 0).cummax(0).values
        closed = torch.where(closes, step, 0).cummax(0).values
        begun = self.firsts.index_select(0, self.sequences)[:, None]
        return ((opened > closed) & (opened > begun)) | (before.index_select(0, self.sequences) & (closed <= begun))


@lru_cache(maxsize=256)
def _columns(lags: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """How far behind, and what is the least position there, int64 [lags,1] each."""
    with torch.inference_mode(False):
        far, first = torch.tensor(lags, device=device).unsqueeze(-1).unbind(1)
        return far.contiguous(), first - 1
