"""What the loop and the tables need of a protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from unbind_core.progress import ProgressCallback
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.served import Served
from unbind_lab.setting import Setting

Column = tuple[str, str, str]  # head, name in the summary, format


def nothing(_own: Mapping[str, float], _full: Mapping[str, float]) -> Summary:
    """What most protocols add."""
    return {}


def no_files(_setting: Setting) -> list[str]:
    """What most protocols need of the user."""
    return []


@dataclass(frozen=True)
class Protocol:
    """``records`` measures a system; ``summary`` is of records alone; ``columns`` are what a table shows of a summary and of what
    stands ``beside`` it: figures of a system's summary and M_full's. ``variants``, where a system has figures in several, whose
    names then are ``VARIANT: FIGURE``: a table has a row each, under the head that is given here. ``further``: modules, or packages
    with their data, that it measures with besides its own file: where one of them changes, it is measured again. So it is where the
    SHA-256 of a file of the user's changes, which ``files_of`` a setting says; it raises UnbindError where one is not there.
    """

    name: str
    records: Callable[[Served, Material, ProgressCallback], list[Record]]
    summary: Callable[[Sequence[Record]], Summary]
    columns: tuple[Column, ...]
    beside: Callable[[Mapping[str, float], Mapping[str, float]], Summary] = nothing
    variants: Mapping[str, str] = field(default_factory=dict)
    further: tuple[ModuleType, ...] = ()
    files_of: Callable[[Setting], list[str]] = no_files
