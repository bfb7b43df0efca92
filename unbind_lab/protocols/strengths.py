"""Unbind's modules at other strengths than they were calibrated at: forgetting and utility from none to twice the correction."""

from __future__ import annotations

from collections.abc import Iterator

from unbind_core.progress import ProgressCallback
from unbind_lab.filters.unbind import Modular
from unbind_lab.protocols import varied
from unbind_lab.protocols.main import Material, Record
from unbind_lab.protocols.protocol import Protocol
from unbind_lab.served import Served

STRENGTHS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """The main protocol's for each strength; none of a system that is no module."""
    if not isinstance(served, Modular):
        return []

    def variants() -> Iterator[tuple[str, Served]]:
        yield varied.NONE, served.at(0.0)
        for strength in STRENGTHS:
            yield f"{strength:g}", served.at(strength)

    return varied.records(variants(), material, progress)


PROTOCOL = Protocol(
    "strengths",
    records,
    varied.summary,
    varied.COLUMNS,
    variants={f"{one:g}": f"strength {one:g}" for one in STRENGTHS},
    further=(varied,),
)
