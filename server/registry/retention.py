"""Deletes forget rows: on request, and of themselves once they are older than the settings allow. The digest stays."""

from __future__ import annotations

import time
from typing import Any

from server.registry.audit import Actor
from server.registry.private.files import TakedownFiles
from server.registry.registry import Registry
from server.settings import Settings

DAY = 86_400.0
RETENTION = Actor("retention", "registry")


def purge(registry: Registry, settings: Settings, takedown_id: str, actor: Actor) -> dict[str, Any]:
    """Delete a takedown's rows and what its jobs left of them. Raises NotThere, NotAllowed, StoreUnreachable."""
    kept = TakedownFiles(settings)
    kept.has_forget("")  # a store that does not answer is to hold up no change of others: the purge is one transaction
    return registry.takedowns.purge(takedown_id, kept.purge, actor, time.time())


def purge_old(registry: Registry, settings: Settings) -> list[str]:
    """The takedowns whose rows were older than ``forget_retention_days`` and are gone now."""
    if not settings.forget_retention_days:
        return []
    old = registry.takedowns.purgeable(time.time() - settings.forget_retention_days * DAY)
    for takedown_id in old:
        purge(registry, settings, takedown_id, RETENTION)
    return old
