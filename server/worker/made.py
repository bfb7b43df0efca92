"""The record that the module of a finished job gets."""

from __future__ import annotations

from typing import Any

from server.registry.jobs import Claim
from server.registry.records import NewModule
from server.registry.tables import Origin


def new_module(claim: Claim, published: dict[str, Any], key: str, within: bool) -> NewModule:
    """``key``: where its file is in the store; ``within``: whether its cost is, so that it may become active by itself."""
    options = claim.options
    activation = str(options.get("activation") or "auto")
    return NewModule(
        name=claim.module,
        digest=published["digest"],
        fingerprint=published["fingerprint"],
        file=key,
        origin=Origin.TAKEDOWN,
        activation=activation if within else "manual",
        job_id=claim.job_id,
        takedown_id=claim.takedown_id,
        scope=str(options.get("scope") or ""),
        effective_at=options.get("effective_at"),
        expires_at=options.get("expires_at"),
    )
