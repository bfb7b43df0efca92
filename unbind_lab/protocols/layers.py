"""The paper's layer scan: its gate and push fitted and calibrated at each layer by itself, and how its two directions lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.nn import functional

from unbind_core import fitting
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback
from unbind_lab.filters.unbind import Modular
from unbind_lab.protocols import varied
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Protocol
from unbind_lab.served import Served

MOST = 128  # decoder layers of any model here


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """The main protocol's for each layer, and cos(w,v) of each; none of a system that is not fitted at one layer and another."""
    if not isinstance(served, Modular) or not served.layers:
        return []
    modules = {f"layer-{layer}": fit() for layer, fit in served.layers.items()}

    def variants() -> Iterator[tuple[str, Served]]:
        yield varied.NONE, served.at(0.0)
        for name, module in modules.items():
            yield name, served.under(module)

    directions: list[Record] = [
        {"variant": name, "role": "directions", "cosine": cosine(module)} for name, module in modules.items()
    ]
    return directions + varied.records(variants(), material, progress)


def cosine(module: UnbindModule) -> float:
    """Of the detector's direction w and the output direction v, on [-1,1]."""
    assert module.v is not None
    return float(functional.cosine_similarity(module.w.reshape(-1), module.v.reshape(-1), dim=0))


def summary(found: Sequence[Record]) -> Summary:
    """Of variants, as ever, and ``LAYER: cosine``."""
    cosines = {f"{one['variant']}: cosine": one["cosine"] for one in found if one["role"] == "directions"}
    return {**varied.summary([one for one in found if one["role"] != "directions"]), **cosines}


PROTOCOL = Protocol(
    "layers",
    records,
    summary,
    (("cos(w,v)", "cosine", "+.3f"), *varied.COLUMNS),
    variants={f"layer-{layer}": f"layer {layer}" for layer in range(MOST)},
    further=(varied, fitting),  # of modules that are fitted for it
)
