"""What may become of a module or a guard, and which requests it binds: pure rules. ``modules.py`` applies them to records.

calibrated -> shadow | active -> suspended | superseded | retired

``active`` alone is no promise: without a scope a module is available to the requests that name it, with one it is enforced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from server.registry.refusals import NotAllowed, Stale, Unconditional
from server.registry.tables import Kind, ModuleState

SCOPE = "global|(profile|key):[A-Za-z0-9._-]{1,64}"  # for which requests a module is enforced
LIVE = frozenset({ModuleState.ACTIVE, ModuleState.SHADOW})


class InForce(StrEnum):
    """Whether a module binds requests: told of it, never stored. It follows from state and scope."""

    NONE = "none"
    AVAILABLE = "available"
    ENFORCED = "enforced"


BY_WEIGHT = (InForce.NONE, InForce.AVAILABLE, InForce.ENFORCED)  # what binds least first


class Action(StrEnum):
    """What an operator can ask for. ``superseded`` is never asked for: another version's activation makes it."""

    ACTIVATE = "activate"
    SHADOW = "shadow"
    SUSPEND = "suspend"
    RETIRE = "retire"


LEADS_TO: Mapping[Action, ModuleState] = {
    Action.ACTIVATE: ModuleState.ACTIVE,
    Action.SHADOW: ModuleState.SHADOW,
    Action.SUSPEND: ModuleState.SUSPENDED,
    Action.RETIRE: ModuleState.RETIRED,
}

# An active module is not put into shadow in one step: to stop enforcing is a decision of its own, and has its own entry.
ALLOWED: Mapping[ModuleState, frozenset[Action]] = {
    ModuleState.CALIBRATED: frozenset({Action.ACTIVATE, Action.SHADOW, Action.RETIRE}),
    ModuleState.SHADOW: frozenset({Action.ACTIVATE, Action.SUSPEND, Action.RETIRE}),
    ModuleState.ACTIVE: frozenset({Action.SUSPEND, Action.RETIRE}),
    ModuleState.SUSPENDED: frozenset({Action.ACTIVATE, Action.SHADOW, Action.RETIRE}),
    ModuleState.SUPERSEDED: frozenset({Action.ACTIVATE, Action.RETIRE}),
    ModuleState.RETIRED: frozenset(),
}


def follow(state: ModuleState, action: Action, kind: str = Kind.MODULE) -> ModuleState:
    """The state after ``action``. Raises NotAllowed listing what is allowed."""
    allowed = sorted(ALLOWED[state])
    if action not in allowed:
        remedy = f"allowed now: {', '.join(allowed)}" if allowed else "this is its end; make a new version instead"
        raise NotAllowed(f"a {kind} that is {state} does not take '{action}'; {remedy}")
    return LEADS_TO[action]


def in_force(state: str, scope: str | None, acts: bool = True) -> InForce:
    """Whether a module in this state and scope ("" or None: no scope) binds requests; a guard that only counts never ``acts``."""
    if state != ModuleState.ACTIVE or not acts:
        return InForce.NONE
    return InForce.ENFORCED if scope else InForce.AVAILABLE


def demanded(record: Mapping[str, Any], scopes: Collection[str]) -> bool:
    """Whether a record says that it applies in one of these scopes."""
    return record.get("state") == ModuleState.ACTIVE and record.get("scope") in scopes


def bound(scope: str | None) -> str:
    """The requests that an active module of this scope binds, in words."""
    kind, _, name = (scope or "").partition(":")
    return {
        "": "no request but those that name it, themselves or by a profile, key or policy",
        "global": "every request to this service",
        "profile": f"every request under the profile '{name}', and others only where they name it",
        "key": f"every request with the key '{name}', and others only where they name it",
    }[kind]


def binds(state: str, scope: str | None, acts: bool = True) -> str:
    """The requests that a module or a guard binds as it is now, in words."""
    match ModuleState(state):
        case ModuleState.ACTIVE if not acts:
            return "nothing: its action is to count what it would block"
        case ModuleState.ACTIVE:
            return bound(scope)
        case ModuleState.SHADOW:
            return "nothing: it is measured and never applied"
        case ModuleState.SUPERSEDED | ModuleState.RETIRED:
            return f"nothing: it is {state}"
    return f"nothing while it is {state}; once active, {bound(scope)}"


def here(view: dict[str, Any], model: str | None) -> dict[str, Any]:
    """A view as it stands where this model runs (its fingerprint; None: it is not known): a module for another binds nothing."""
    if model is None or view["kind"] == Kind.GUARD or view["fingerprint"] == model:
        return view
    return {**view, "in_force": InForce.NONE, "binds": "nothing here: it is for a model that does not run here"}


def reached(view: dict[str, Any], unreached: str) -> dict[str, Any]:
    """A view as it stands where no request comes under its scope, for the reason ``unreached`` ("": requests do)."""
    if not unreached or view["in_force"] != InForce.ENFORCED:
        return view
    return {**view, "in_force": InForce.AVAILABLE, "binds": f"{bound(None)}, as {unreached}"}


def expired(expires_at: float | None, now: float) -> bool:
    """Whether the time of a record is over."""
    return expires_at is not None and expires_at <= now


def ended_at(expires_at: float | None) -> str:
    """When a time was over, in words."""
    return datetime.fromtimestamp(expires_at or 0.0, UTC).isoformat(timespec="seconds")


def over(view: dict[str, Any], now: float) -> dict[str, Any]:
    """A view as it stands where its time is over and the clock, which retires what is live, leaves it: it never comes back."""
    if view["state"] in (*LIVE, ModuleState.RETIRED) or not expired(view["expires_at"], now):
        return view
    left = [action for action in view["allowed"] if LEADS_TO[action] not in LIVE]
    return {
        **view,
        "allowed": left,
        "binds": f"nothing: it expired at {ended_at(view['expires_at'])}, and does not come back",
    }


def check_revision(record: Mapping[str, Any], expected: str | None) -> None:
    """Let a change through that is meant for the record as it is. Raises Unconditional, Stale."""
    if expected is None:
        raise Unconditional(f"If-Match: say which revision is meant; it is {record['etag']} now")
    if expected.strip() not in ("*", record["etag"]):
        raise Stale(
            f"If-Match: {record['kind']} {record['id']} has changed since ({record['etag']} now); look at it again"
        )


def standing(view: Mapping[str, Any]) -> str:
    """How a record stands by its ``in_force``, ``state`` and ``scope``, as people are told of it, in a word or two."""
    match view["in_force"]:
        case InForce.ENFORCED:
            return f"enforced ({view['scope']})"
        case InForce.AVAILABLE:
            return "available" if view.get("kind") == Kind.GUARD else "calibrated and available"
    return str(view["state"])
