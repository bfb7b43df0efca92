"""Which version of which modules a request runs under: held from admission to its last token.

Made by ``ModuleTable.pin``, carried by the request, read by the runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unbind_core.module import UnbindModule


@dataclass(frozen=True, eq=False)
class LoadedModule:
    """One version of a module in the bank."""

    key: str
    module: UnbindModule
    digest: str

    @property
    def label(self) -> str:
        """``name@digest12``, as answers carry it."""
        return f"{self.module.name}@{self.digest[:12]}"


@dataclass(frozen=True)
class PinnedSet:
    """The modules of one request: holds its entries in the bank for as long as the request lives.

    ``factors``: each entry's multiple of its calibrated strength; empty where all are 1. At 0 a module is measured only.
    """

    entries: tuple[LoadedModule, ...] = ()
    factors: tuple[float, ...] = ()

    @cached_property
    def strengths(self) -> Mapping[str, float]:
        """Bank key -> strength multiplier, as ``ModuleBank.select`` takes it."""
        factors = self.factors or (1.0,) * len(self.entries)
        return {entry.key: factor for entry, factor in zip(self.entries, factors, strict=True)}

    @cached_property
    def identity(self) -> tuple[tuple[str, float], ...]:
        """What keys and values computed under this set depend on. Bank keys are never given to another module."""
        return tuple(sorted(self.strengths.items()))

    @property
    def labels(self) -> tuple[str, ...]:
        """``name@digest12`` of each."""
        return tuple(entry.label for entry in self.entries)


NOTHING = PinnedSet()
