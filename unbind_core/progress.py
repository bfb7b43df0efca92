"""How long work tells where it is, and how it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` steps of ``stage``. Raising :class:`unbind_core.errors.Cancelled` from the callback stops the work."""

    stage: str
    done: int
    total: int
    message: str = ""


ProgressCallback = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """The callback for nobody."""


def counted(items: Iterable[T], total: int, stage: str, progress: ProgressCallback) -> Iterator[T]:
    """Yield ``items`` and report after each."""
    progress(Progress(stage, 0, total))
    for done, item in enumerate(items, start=1):
        yield item
        progress(Progress(stage, done, total))
