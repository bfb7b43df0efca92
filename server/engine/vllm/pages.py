"""The memory of gates in the pages of vLLM's KV cache: a row for every slot of a page.

A page that is reused brings its rows along, as does one that is computed again after a preemption.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unbind_core.applying.places import WHOLE_ROW, Addresses, Places
from unbind_core.errors import UnbindError


def whole(specs: Iterable[Any]) -> list[Any]:
    """Those of vLLM's specs by which a sequence keeps all of its pages: keys and values of full attention. Raises UnbindError where
    none is.
    """
    found = [spec for spec in specs if type(spec).__name__ == "FullAttentionSpec"]
    if not found:
        raise UnbindError(
            "no layer of this model keeps keys and values of full attention, in whose pages gates remember (all have a sliding "
            "window, or latent attention, MLA); use the embedded engine"
        )
    return found


class PagedMemory:
    """int32 [1 + slots, columns]: zeros in front of every sequence, then the slots of all pages. One table for all layers, as
    modules share its columns out between them.
    """

    def __init__(self, pages: int, size: int, columns: int, device: torch.device) -> None:
        """``size``: positions of a page."""
        self.size = size
        with torch.inference_mode(False):
            self.table = torch.zeros((1 + pages * size, columns), dtype=torch.int32, device=device)


class Pages(Places):
    """Where the tokens of one step stand: flat, as vLLM schedules them, prompts and single tokens mixed."""

    def __init__(
        self, memory: PagedMemory, table: Tensor, begins: Tensor, starts: Tensor, positions: Tensor, slots: Tensor
    ) -> None:
        """``table`` int [S,pages of a sequence]; ``begins`` int [S], where in the step each sequence begins; ``starts`` int64 [S],
        the position of its first token of the step; ``positions`` int64 [N]; ``slots`` int [N], of the pages, where vLLM itself
        writes the tokens.
        """
        super().__init__(positions, begins.long(), starts)
        self._memory, self._pages, self._slots = memory, table, slots

    @cached_property
    def here(self) -> Tensor:
        """See :meth:`Places.here`."""
        return self._slots.long() + 1

    def rows(self, positions: Tensor, sequences: Tensor | None) -> Tensor:
        """See :meth:`Places.rows`."""
        inside = positions.clamp(min=0)
        size, pages = self._memory.size, self._pages[: len(self.firsts)]
        page = inside.div(size, rounding_mode="floor")
        each = page.view(-1, len(pages)).t() if sequences is None else None
        found = pages[sequences, page] if each is None else pages.gather(1, each).t().view(page.shape)
        return torch.where(positions < 0, 0, torch.add(inside % size, found.long(), alpha=size).add_(1))

    def read(self, layer: int, rows: Tensor, width: int, part: slice = WHOLE_ROW) -> Tensor:
        """See :meth:`Places.read`."""
        return self._memory.table[:, part].index_select(0, rows)

    def write(self, layer: int, columns: Tensor | slice, values: Tensor) -> None:
        """See :meth:`Places.write`."""
        if isinstance(columns, slice):
            self._memory.table[:, columns].index_copy_(0, self.here, values)
        else:
            self._memory.table[self.here.unsqueeze(1), columns] = values


class LastPositions(Pages):
    """Where every sequence has one token of the step, its last, as in most steps: nothing is computed before somebody asks."""

    def __init__(self, memory: PagedMemory, table: Tensor, lengths: Tensor, slots: Tensor) -> None:
        """``lengths`` int [S], of the sequences with their token of the step; the rest as :class:`Pages` has it."""
        self._lengths, self._behind = lengths, {}
        self._memory, self._pages, self._slots = memory, table, slots

    @property
    def alone(self) -> bool:
        """See :attr:`Places.alone`."""
        return True

    @cached_property
    def positions(self) -> Tensor:  # type: ignore[override]
        """See :class:`Places`."""
        return self._lengths.long() - 1

    @cached_property
    def starts(self) -> Tensor:  # type: ignore[override]
        """See :class:`Places`."""
        return self.positions

    @cached_property
    def firsts(self) -> Tensor:  # type: ignore[override]
        """See :class:`Places`."""
        return torch.arange(len(self._lengths), device=self._lengths.device)

    def addresses(self, layer: int, width: int) -> Addresses | None:
        """See :meth:`Places.addresses`."""
        return Addresses(self._memory.table, self._lengths, -1, self._pages, self._memory.size, True)
