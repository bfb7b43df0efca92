"""A takedown that joins others: its module supersedes theirs in the moment that it becomes active, and not before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.evidence.bundle import evidence
from server.registry.access import Access
from server.registry.audit import Actor
from server.registry.jobs import Claim
from server.registry.lifecycle import Action
from server.registry.refusals import JointOutdated
from server.registry.registry import Registry
from server.registry.tables import JobState
from server.rules import Rules
from server.settings import Settings
from server.worker.plan import Task, withheld
from tests.server.registry.test_registry import claim, made_by, submit

ADMIN = Actor("admin", "test")


def takedown(registry: Registry, name: str, now: float, **options: Any) -> Claim:
    """A takedown whose job is under way."""
    submit(registry, name, now, forget_digest=f"rows of {name}", options={"scope": "global", **options})
    return claim(registry, now=now)


def finished(registry: Registry, held: Claim, now: float, **fields: Any) -> str:
    """Its module once the job has ended."""
    beside = fields.pop("beside", None)
    module = made_by(held, scope="global", **fields)
    registry.jobs.finish(held, JobState.SUCCEEDED, now, result={}, module=module, beside=beside)
    return str(registry.jobs.get(held.job_id, now)["module_id"])


def two(registry: Registry) -> list[str]:
    """The takedowns ``first`` and ``second``, whose modules are active."""
    made = []
    for number, name in enumerate(("first", "second"), 1):
        held = takedown(registry, name, float(number))
        finished(registry, held, number + 0.5)
        made.append(str(held.takedown_id))
    return made


def states(registry: Registry) -> dict[str, str]:
    return {f"{one['name']}@{one['version']}": one["state"] for one in registry.modules.versions()}


def test_what_is_joined_holds_until_the_module_that_joins_it_is_active(registry: Registry, tmp_path: Path) -> None:
    first, second = two(registry)
    held = takedown(registry, "both", 3.0, joins=[first, second])
    assert registry.takedowns.get(first)["joined_by"] == [held.takedown_id]
    assert states(registry) == {"first@1": "active", "second@1": "active"}
    both = finished(registry, held, 4.0, activation="manual")
    assert states(registry) == {"first@1": "active", "second@1": "active", "both@1": "calibrated"}
    registry.modules.act(both, Action.ACTIVATE, "*", ADMIN, 5.0)
    assert states(registry) == {"first@1": "superseded", "second@1": "superseded", "both@1": "active"}
    by = [row["detail"] for row in registry.audit_of({one["id"] for one in registry.takedowns.get(first)["modules"]})]
    assert any(said.get("by") == both for said in by)
    for told in (registry.takedowns.get(first), *registry.takedowns.newest()):
        assert (told["in_force"], told["binds"]) == ("enforced", "every request to this service")
    document = evidence(registry, Settings(data_dir=tmp_path), first, {"name": "tiny", "fingerprint": "model"})
    assert [view["id"] for view in document["payload"]["successors"]] == [both]
    assert f"Its module was superseded by version 1 of &#39;both&#39; ({both})" in document["html"]
    assert "this takedown itself binds nothing" in document["html"]
    registry.modules.act(both, Action.SUSPEND, "*", ADMIN, 6.0)
    assert registry.takedowns.get(first)["in_force"] == "none" == registry.takedowns.newest()[-1]["in_force"]
    registry.modules.act("first", Action.ACTIVATE, "*", ADMIN, 7.0)  # the way back
    assert registry.takedowns.get(first)["in_force"] == "enforced"


def test_the_evidence_says_superseded_only_of_what_is_so(registry: Registry, tmp_path: Path) -> None:
    first, second = two(registry)
    both = takedown(registry, "both", 3.0, joins=[first, second])
    finished(registry, both, 4.0)
    registry.modules.act("first", Action.ACTIVATE, "*", ADMIN, 5.0)
    registry.modules.act("second", Action.RETIRE, "*", ADMIN, 5.0)
    for takedown_id in (first, second):
        document = evidence(
            registry, Settings(data_dir=tmp_path), takedown_id, {"name": "tiny", "fingerprint": "model"}
        )
        assert "was superseded by" not in document["html"]
        assert "Another module, version 1 of &#39;both&#39;" in document["html"]


def test_a_later_version_with_other_rows_is_not_superseded(registry: Registry) -> None:
    first, second = two(registry)
    held = takedown(registry, "both", 3.0, joins=[first, second])
    newer = takedown(registry, "second", 3.5, replace=True)
    finished(registry, newer, 3.6)
    finished(registry, held, 4.0)
    assert states(registry) == {
        "first@1": "superseded",
        "second@1": "superseded",
        "second@2": "active",
        "both@1": "active",
    }


def joined_twice(registry: Registry) -> list[str]:
    """``first``, ``second`` and ``third``, of which ``both`` joins two, and its next version ``both`` and the third."""
    made = two(registry)
    both = takedown(registry, "both", 3.0, joins=made)
    finished(registry, both, 3.5)
    third = takedown(registry, "third", 4.0)
    finished(registry, third, 4.5)
    every = takedown(registry, "both", 5.0, replace=True, joins=[str(both.takedown_id), str(third.takedown_id)])
    finished(registry, every, 5.5)
    assert set(states(registry).values()) == {"superseded", "active"} and states(registry)["both@2"] == "active"
    return [*made, str(third.takedown_id), str(both.takedown_id)]


@pytest.mark.parametrize("how", ["rollback", "activate"])
def test_what_only_a_later_version_stood_in_for_comes_back_with_the_one_before(registry: Registry, how: str) -> None:
    first, second, third, _ = joined_twice(registry)
    if how == "rollback":
        registry.modules.rollback("both", "*", ADMIN, 6.0)
    else:
        before = next(one for one in registry.modules.versions("both") if one["version"] == 1)
        registry.modules.act(before["id"], Action.ACTIVATE, "*", ADMIN, 6.0)
    standing = states(registry)
    assert (standing["both@1"], standing["both@2"], standing["third@1"]) == ("active", "superseded", "active")
    assert (standing["first@1"], standing["second@1"]) == ("superseded", "superseded")
    assert {registry.takedowns.get(one)["in_force"] for one in (first, second, third)} == {"enforced"}
    latest = registry.modules.versions("both")[-1]["id"]
    registry.modules.act(latest, Action.ACTIVATE, "*", ADMIN, 7.0)
    assert [name for name, state in states(registry).items() if state == "active"] == ["both@2"]


def test_a_version_without_their_rows_brings_back_what_the_one_before_stood_in_for(registry: Registry) -> None:
    _, second, *_ = joined_twice(registry)
    registry.modules.act(registry.takedowns.get(second)["modules"][0]["id"], Action.RETIRE, "*", ADMIN, 6.0)
    finished(registry, takedown(registry, "both", 7.0, replace=True), 8.0)
    standing = states(registry)
    assert {name for name, state in standing.items() if state == "active"} == {"first@1", "third@1", "both@3"}
    assert standing["second@1"] == "retired"  # who is withdrawn stays so


def test_what_another_still_stands_in_for_or_its_own_next_version_replaced_does_not_come_back(
    registry: Registry,
) -> None:
    parts = two(registry)
    for name, now in (("one", 3.0), ("two", 4.0)):
        finished(registry, takedown(registry, name, now, joins=parts), now + 0.5)
    finished(registry, takedown(registry, "one", 5.0, replace=True), 5.5)
    assert {name for name, state in states(registry).items() if state == "active"} == {"two@1", "one@2"}
    finished(registry, takedown(registry, "first", 6.0, replace=True), 6.5)
    finished(registry, takedown(registry, "two", 7.0, replace=True), 7.5)
    standing = {name for name, state in states(registry).items() if state == "active"}
    assert standing == {"one@2", "first@2", "second@1", "two@2"}


@pytest.mark.parametrize("part", ["modules", "enforced"])
def test_what_a_policy_has_named_since_stays_active_beside_what_joins_it(registry: Registry, part: str) -> None:
    first, second = two(registry)
    access = Access(registry.transactions)
    access.put_rules("profile:old", Rules(enforced={"second": 1.0}), ADMIN, 2.5)  # told of when it was posted
    held = takedown(registry, "both", 3.0, joins=[first, second])
    access.put_rules("global", Rules.model_validate({part: {"first": 1.0}}), ADMIN, 3.5)
    finished(registry, held, 4.0)
    assert states(registry) == {"first@1": "active", "second@1": "superseded", "both@1": "active"}


def measured_with(registry: Registry, held: Claim) -> list[dict[str, Any]]:
    """The records of the modules beside which its cost is measured now."""
    in_force, replaces = registry.modules.in_force(), registry.superseding(held.takedown_id)
    task = Task(held.job_id, held.kind, held.module, "", dict(held.options), "", {}, None, in_force, "", replaces)
    return task.beside("model")


def test_what_stays_as_a_policy_has_named_it_since_is_measured_beside_what_joins_it(registry: Registry) -> None:
    held = takedown(registry, "both", 3.0, joins=two(registry))
    assert measured_with(registry, held) == []
    Access(registry.transactions).put_rules("global", Rules(enforced={"first": 1.0}), ADMIN, 3.5)
    beside = measured_with(registry, held)
    assert [one["name"] for one in beside] == ["first"]
    finished(registry, held, 4.0, beside=[one["digest"] for one in beside])
    assert states(registry) == {"first@1": "active", "second@1": "superseded", "both@1": "active"}


def test_the_joint_cost_leaves_out_what_is_joined_and_nothing_else(registry: Registry) -> None:
    first, _ = two(registry)
    held = takedown(registry, "both", 3.0, joins=[first])
    beside = measured_with(registry, held)
    assert [one["name"] for one in beside] == ["second"]
    with pytest.raises(JointOutdated, match="second"):
        finished(registry, held, 4.0, beside=[])
    finished(registry, held, 4.0, beside=[one["digest"] for one in beside])
    assert states(registry) == {"first@1": "superseded", "second@1": "active", "both@1": "active"}


def test_a_short_module_does_not_stand_in_for_any() -> None:
    short = {"fit": {"outcome": "short"}, "joint": {"within": True}}
    assert "the modules that it joins hold" in withheld(short, {"joins": ["td_1"]})
    assert withheld(short, {}) == "" == withheld({"fit": {"outcome": "calibrated"}}, {"joins": ["td_1"]})


def test_whoever_purges_rows_is_told_of_all_that_have_them_still(registry: Registry) -> None:
    first, second = two(registry)
    both = takedown(registry, "both", 3.0, joins=[first, second])
    finished(registry, both, 4.0)
    third = takedown(registry, "third", 5.0)
    finished(registry, third, 6.0)
    every = takedown(registry, "every", 7.0, joins=[str(both.takedown_id), str(third.takedown_id)])
    finished(registry, every, 8.0)
    assert registry.takedowns.get(first)["joined_by"] == [both.takedown_id, every.takedown_id]
    assert registry.takedowns.get(first)["in_force"] == "enforced" and states(registry)["both@1"] == "superseded"
    deleted = list[str]()

    def purge(identifier: str | None) -> list[str]:
        found = registry.takedowns.purge(str(identifier), lambda digest, _: deleted.append(digest), ADMIN, 9.0)
        return list(found["rows_kept_by"])

    assert purge(first) == [both.takedown_id, every.takedown_id] and deleted == ["rows of first"]
    assert purge(both.takedown_id) == [every.takedown_id]
    assert purge(every.takedown_id) == [] == registry.takedowns.get(first)["rows_kept_by"]


def test_what_joins_a_joined_one_has_its_rows_though_the_clock_went_back(registry: Registry) -> None:
    first, second = two(registry)
    both = takedown(registry, "both", 3.0, joins=[first, second])
    finished(registry, both, 4.0)
    every = takedown(registry, "every", 2.9, joins=[str(both.takedown_id)])
    finished(registry, every, 5.0)
    assert registry.takedowns.get(first)["joined_by"] == [every.takedown_id, both.takedown_id]
    assert registry.takedowns.get(first)["in_force"] == "enforced" and states(registry)["both@1"] == "superseded"
