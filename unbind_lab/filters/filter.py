"""What a system that leaves the weights alone is: how it is made of rows, and the numbers it can be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from unbind_core.errors import UnbindError
from unbind_core.rows import ForgetRow
from unbind_lab.served import Served
from unbind_lab.setting import Bench

Options = Mapping[str, float]


class Absent(UnbindError):
    """A setting lacks what a system is made of; the others can be measured all the same."""


Build = Callable[[Bench, Sequence[ForgetRow], Options, Path], Served]


@dataclass(frozen=True)
class Filter:
    """``build`` makes it of rows to forget and its options; the folder it is given is its own, for what takes long.

    ``paper``: the options of the paper, or of the system's own authors. ``grid``: those that are tried on the validation rows; none
    where there is nothing to choose. ``module``: the name of the setting's module that it is, where it is one. ``further``: modules
    or packages that it is made of besides its own file.
    """

    name: str
    build: Build
    paper: Options | None = None
    grid: tuple[Options, ...] = ()
    module: str | None = None
    further: tuple[ModuleType, ...] = ()
