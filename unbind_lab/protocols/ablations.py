"""Unbind's modules without one of their parts: the gate, its second threshold, the correction's dependence on the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback
from unbind_lab.filters.unbind import Modular
from unbind_lab.protocols import varied
from unbind_lab.protocols.main import Material, Record
from unbind_lab.protocols.protocol import Protocol
from unbind_lab.served import Served

LOWEST = -1e6  # a reference that every score of a network is above


def _open(module: UnbindModule) -> UnbindModule:
    """The amount of a linear detector is its score above the reference, so that stays."""
    if module.detector == "network":
        return replace(module, s_ref=LOWEST, tau=1.0, tau_close=None)
    return replace(module, tau=0.0, tau_close=None)


def _one_threshold(module: UnbindModule) -> UnbindModule:
    return module if module.tau_close is None else replace(module, tau_close=None)


def _constant(module: UnbindModule) -> UnbindModule:
    return module if module.u is None else replace(module, u=torch.zeros_like(module.u))


def _linear(module: UnbindModule) -> UnbindModule:
    return module if module.c is None else replace(module, c=torch.zeros_like(module.c))


VARIANTS: dict[str, tuple[str, Callable[[UnbindModule], UnbindModule]]] = {
    "whole": ("the module", lambda module: module),
    "open": ("gate always open", _open),
    "one": ("one threshold", _one_threshold),
    "constant": ("constant alone", _constant),
    "linear": ("no constant", _linear),
}


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """The main protocol's for each variant; none of a system that is no module, nor of a variant that leaves nothing out."""
    if not isinstance(served, Modular):
        return []

    def variants() -> Iterator[tuple[str, Served]]:
        yield varied.NONE, served.at(0.0)
        for name, (_, change) in VARIANTS.items():
            module = change(served.module)
            if module is not served.module or name == "whole":
                yield name, served.under(module)

    return varied.records(variants(), material, progress)


PROTOCOL = Protocol(
    "ablations",
    records,
    varied.summary,
    varied.COLUMNS,
    variants={name: head for name, (head, _) in VARIANTS.items()},
    further=(varied,),
)
