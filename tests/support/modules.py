"""Modules for a tiny random model that visibly change its output."""

from __future__ import annotations

import torch
from torch import Tensor

from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.module_checks import PARTITIONS


def build_module(
    identity: ModelIdentity, name: str, layer: int = 1, seed: int = 0, kappa: float = 30.0
) -> UnbindModule:
    """A module whose gate opens often, so that its effect shows."""
    generator = torch.Generator().manual_seed(seed)

    def unit() -> Tensor:
        vector = torch.randn(identity.hidden_size, generator=generator)
        return vector / vector.norm()

    return UnbindModule(
        name=name,
        layer=layer,
        w=unit(),
        v=unit(),
        s_ref=-0.5,
        tau=0.1,
        kappa=kappa,
        quantile=0.5,
        model=identity,
        forms=("plain",),
        partitions=dict.fromkeys(PARTITIONS, ()),
        budgets={},
        measured={},
        forget_digest="0" * 64,
        created_at="2026-01-01T00:00:00+00:00",
        versions={},
        settings={},
    )
