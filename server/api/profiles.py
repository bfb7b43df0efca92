"""Profiles: named sets of modules that a key, a model alias or a path can choose. From the settings file or the registry."""

from __future__ import annotations

import time

from server.base_service import BaseService
from server.errors import ApiError
from server.registry.access import PROFILE_SCOPE, SERVER_SCOPE
from server.rules import Rules

PROFILE_KEY = "unbind.profile"  # where the middleware leaves the profile of the path


def profile_names(served: BaseService) -> list[str]:
    """Every profile there is."""
    return served.access.current.profiles(served.settings)


def scopes(served: BaseService) -> set[str]:
    """Every scope that can have rules and modules of its own: ``global``, ``key:ID`` and ``profile:NAME``."""
    keys = (f"key:{key.id}" for key in served.access.current.keys.values())
    return {SERVER_SCOPE, *keys, *(PROFILE_SCOPE + name for name in profile_names(served))}


def unreached(served: BaseService, scope: str) -> str:
    """Why no request comes under a scope now, as under that of a revoked key; "" where requests may."""
    return served.access.current.unreached(scope, time.time(), served.settings.profiles)


def profile_rules(served: BaseService, name: str, *, asked: bool = False) -> Rules:
    """The rules of a profile. Raises ApiError: 404 where a request ``asked`` for one that is not there, else 503."""
    found = served.settings.profiles.get(name) or served.access.current.rules.get(PROFILE_SCOPE + name)
    if found is not None:
        return found
    if asked:
        known = ", ".join(profile_names(served)) or "none"
        raise ApiError(404, f"profile '{name[:80]}' does not exist; there are: {known}", code="profile_not_found")
    raise ApiError(
        503,
        f"the key's profile '{name[:80]}' does not exist; nothing is served without it",
        code="profile_unavailable",
        headers={"Retry-After": "10"},
    )
