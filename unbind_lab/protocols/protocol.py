"""What the loop and the tables need of a protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unbind_core.progress import ProgressCallback
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.served import Served

Column = tuple[str, str, str]  # head, name in the summary, format


@dataclass(frozen=True)
class Protocol:
    """``records`` measures a system; ``summary`` is of records alone; ``columns`` are what a table shows of a summary."""

    name: str
    records: Callable[[Served, Material, ProgressCallback], list[Record]]
    summary: Callable[[Sequence[Record]], Summary]
    columns: tuple[Column, ...]
