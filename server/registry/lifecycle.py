"""What may become of a module: pure rules. ``modules.py`` applies them to records, each in one transaction.

calibrated -> shadow | active -> suspended | superseded | retired
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from server.registry.refusals import NotAllowed
from server.registry.tables import ModuleState

LIVE = frozenset({ModuleState.ACTIVE, ModuleState.SHADOW})


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


def follow(state: ModuleState, action: Action) -> ModuleState:
    """The state after ``action``. Raises NotAllowed listing what is allowed."""
    allowed = sorted(ALLOWED[state])
    if action not in allowed:
        remedy = f"allowed now: {', '.join(allowed)}" if allowed else "this is its end; make a new version instead"
        raise NotAllowed(f"a module that is {state} does not take '{action}'; {remedy}")
    return LEADS_TO[action]
