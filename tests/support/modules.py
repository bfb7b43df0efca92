"""Modules for a tiny random model that visibly change its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.core.conftest import lowrank
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.partitions import PARTITIONS


def build_module(
    identity: ModelIdentity, name: str, layer: int = 1, seed: int = 0, kappa: float = 30.0, **changes: Any
) -> UnbindModule:
    """A module whose gate opens often, so that its effect shows; ``changes`` are further fields, or others than these."""
    generator = torch.Generator().manual_seed(seed)

    def unit() -> Tensor:
        vector = torch.randn(identity.hidden_size, generator=generator)
        return vector / vector.norm()

    fields: dict[str, Any] = {"w": unit(), "v": unit(), "measured": {}} | changes
    return UnbindModule(
        name=name,
        layer=layer,
        s_ref=-0.5,
        tau=0.1,
        kappa=kappa,
        quantile=0.5,
        model=identity,
        forms=("plain",),
        partitions=dict.fromkeys(PARTITIONS, ()),
        budgets={},
        forget_digest="0" * 64,
        created_at="2026-01-01T00:00:00+00:00",
        versions={},
        settings={},
        **fields,
    )


def rectified(size: int, units: int = 3, seed: int = 0) -> dict[str, Any]:
    """The fields that give a module a network for a correction; its numbers are multiples of 1/4."""
    low = lowrank(size, units, seed)
    e = torch.randint(-4, 5, (units,), generator=torch.Generator().manual_seed(2000 + seed)) / 4
    return low | {"correction": "network", "u": low["u"].bfloat16(), "a": low["a"].bfloat16(), "e": e}
