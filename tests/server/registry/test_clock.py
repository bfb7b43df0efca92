"""A clock that jumps ahead and is put right: what it ended early stands again, and nothing that anybody decided is undone."""

from __future__ import annotations

from typing import Any

import pytest

from server.registry import audit, modules, records
from server.registry.audit import Actor, digest_of
from server.registry.lifecycle import Action
from server.registry.records import NewModule
from server.registry.registry import Registry
from server.registry.tables import Kind, Origin

ADMIN = Actor("admin", "test")
ENDS = 1e6
AHEAD = 2e6


def add(registry: Registry, number: int, now: float, kind: Kind = Kind.MODULE, **fields: Any) -> str:
    digest = f"{number:064x}"
    new = NewModule("m", digest, "model", f"objects/{digest}", Origin.TAKEDOWN, scope="global", kind=kind, **fields)
    with registry.transactions.change() as session:
        return records.add(session, new, new.activation, ADMIN, now).id


def states(registry: Registry) -> list[str]:
    return [record["state"] for record in registry.modules.versions("m")]


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("state", ["active", "shadow"])
def test_what_a_clock_that_was_ahead_retired_stands_as_before_once_it_is_right(
    registry: Registry, kind: Kind, state: str
) -> None:
    how = "auto" if state == "active" else state
    identifier = add(registry, 1, 1.0, kind, expires_at=ENDS, activation=how)
    registry.modules.pass_time(AHEAD)
    assert states(registry) == ["retired"]
    registry.modules.pass_time(ENDS - 1)  # the clocks of two servers may differ by so much
    assert states(registry) == ["retired"]
    registry.modules.pass_time(10.0)
    assert states(registry) == [state]
    (*_, last) = registry.audit_of([identifier])
    assert (last["actor"], last["action"]) == ("clock", f"{kind}.return")
    (view,) = registry.modules.versions("m")
    assert last["after"] == digest_of(
        {name: value for name, value in view.items() if name not in ("in_force", "binds")}
    )
    registry.modules.pass_time(ENDS)
    assert states(registry) == ["retired"]


def test_a_start_after_the_clock_was_put_right_brings_back_as_well(registry: Registry) -> None:
    add(registry, 1, 1.0, expires_at=ENDS)
    registry.modules.pass_time(AHEAD)
    Registry(registry.engine).modules.pass_time(10.0)
    assert states(registry) == ["active"]


def test_what_was_to_come_into_force_later_does_so_still(registry: Registry) -> None:
    add(registry, 1, 1.0, effective_at=100.0, expires_at=ENDS)
    registry.modules.pass_time(AHEAD)
    registry.modules.pass_time(10.0)
    (record,) = registry.modules.versions("m")
    assert (record["state"], record["effective_at"]) == ("calibrated", 100.0)
    registry.modules.pass_time(101.0)
    assert states(registry) == ["active"]


def test_the_version_that_stood_comes_back_and_one_that_waited_waits_again(registry: Registry) -> None:
    add(registry, 1, 1.0, expires_at=ENDS)
    add(registry, 2, 2.0, expires_at=ENDS, effective_at=100.0)
    registry.modules.pass_time(AHEAD)
    assert states(registry) == ["retired", "retired"]
    registry.modules.pass_time(10.0)
    assert states(registry) == ["active", "calibrated"]


def test_what_somebody_retired_stays_so(registry: Registry) -> None:
    identifier = add(registry, 1, 1.0, expires_at=ENDS)
    registry.modules.act(identifier, Action.RETIRE, "*", ADMIN, AHEAD)  # while the clock was ahead
    registry.modules.pass_time(10.0)
    assert states(registry) == ["retired"]


@pytest.mark.parametrize("then", [None, Action.SUSPEND, Action.RETIRE])
def test_nothing_comes_back_beside_a_version_that_was_made_since(registry: Registry, then: Action | None) -> None:
    add(registry, 1, 1.0, expires_at=ENDS)
    registry.modules.pass_time(AHEAD)
    newer = add(registry, 2, AHEAD)
    if then is not None:
        registry.modules.act(newer, then, "*", ADMIN, AHEAD)
    before = states(registry)
    registry.modules.pass_time(10.0)
    assert states(registry) == before and before[0] == "retired"


def test_two_servers_whose_clocks_disagree_do_not_undo_each_other_all_the_time(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(registry, 1, 1.0, expires_at=ENDS)
    ahead, right = Registry(registry.engine).modules, registry.modules
    for second in range(20):
        ahead.pass_time(AHEAD + second)
        right.pass_time(10.0 + second)
    assert [row["action"] for row in registry.audit(limit=100)].count("module.return") == 1
    monkeypatch.setattr(modules, "RETURN_SECONDS", 0.0)
    monkeypatch.setattr(audit, "WHOLE_SECONDS", 1e-9)  # the next look is at everything
    right.pass_time(40.0)
    assert states(registry) == ["active"]
