"""A module that must show: what tells whether edits are at work in a process."""

from __future__ import annotations

import torch

from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.partitions import FIRST_PARTITIONS


def probe_module(identity: ModelIdentity, layer: int) -> UnbindModule:
    """A module whose gate is open wherever it is asked for, and whose correction no model can miss."""
    d = identity.hidden_size
    v = torch.randn(d, generator=torch.Generator().manual_seed(layer))
    return UnbindModule(
        name="probe",
        layer=layer,
        detector="network",
        w=torch.full((1, d), 1e-9),  # next to nothing beside b
        b=torch.ones(1),
        heads=torch.ones(1, 1),
        heads_b=torch.zeros(1),
        v=v / v.norm(),
        s_ref=0.0,
        tau=0.5,
        kappa=1000.0,
        quantile=None,
        model=identity,
        forms=("plain",),
        partitions=dict.fromkeys(FIRST_PARTITIONS, ()),
        budgets={},
        measured={},
        forget_digest="",
        created_at="",
        versions={},
        settings={},
    )
