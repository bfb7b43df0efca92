"""Takedowns that overlap: what is in force when a module is published decides, not what was when its cost was measured."""

from __future__ import annotations

import time

import pytest

from server.registry.tables import JobKind
from tests.system.workshop import ADMIN, Workshop

DEVICES = ("cpu:0", "cpu:1")  # one job at a time on each, so these two workers overlap


def let_go(shop: Workshop, job_id: str) -> None:
    """A job that waits goes on."""
    (shop.settings.data_dir / "jobs" / job_id / "go").touch()


@pytest.mark.parametrize("dear", [False, True])
def test_of_two_takedowns_that_overlap_the_second_is_measured_beside_the_first(shop: Workshop, dear: bool) -> None:
    late = shop.submit("late", waits="publish", dear=dear)
    for device in DEVICES:
        shop.start(UNBIND_DEVICE=device)
    shop.wait(lambda: shop.job(late)["stage"] == "publish")  # its joint cost is measured: nothing was in force
    (first,) = shop.ended(shop.submit("first"))
    assert first["outcome"] == "active"
    let_go(shop, late)
    (second,) = shop.ended(late)
    joint = second["result"]["joint"]
    assert joint["measured"] and joint["beside"] == [first["result"]["digest"]]
    assert second["outcome"] == ("calibrated" if dear else "active") and second["progress"] == 1.0
    if dear:
        assert "late and first together" in second["result"]["joint_verdict"]
    active = [record["name"] for record in shop.registry.modules.in_force()]
    assert active == (["first"] if dear else ["first", "late"])
    shop.check_what_is_left([first["id"], late])


@pytest.mark.parametrize("dear", [False, True])
def test_an_activation_beside_another_is_in_force_only_where_the_two_are_within_the_budgets(
    shop: Workshop, dear: bool
) -> None:
    shop.start()
    shop.ended(shop.submit("first"), shop.submit("late", activation="manual"))
    late = shop.registry.modules.get("late")
    options = {"etag": late["etag"], "dear": dear}
    asked = shop.registry.jobs.create(JobKind.ACTIVATE, late, options, ADMIN, time.time())
    (job,) = shop.ended(asked["id"])
    assert job["state"] == "succeeded" and job["result"]["joint"]["measured"], job["error"]
    assert job["outcome"] == ("over_joint_budget" if dear else "active")
    assert ("late and first together" in job["result"].get("joint_verdict", "")) == dear
    active = [record["name"] for record in shop.registry.modules.in_force()]
    assert active == (["first"] if dear else ["first", "late"])


def test_a_joint_cost_that_never_settles_leaves_the_module_out_of_force_with_the_reason(shop: Workshop) -> None:
    job_id = shop.submit("m", stale=True)
    shop.start()
    (job,) = shop.ended(job_id)
    assert (job["state"], job["outcome"]) == ("succeeded", "calibrated")
    assert "measured 4 times; activate it" in job["result"]["joint_verdict"]
    shop.wait(lambda: any("succeeded: not in force" in line for line in shop.log))
    told = [line for line in shop.log if "these are in force by now: none" in line]
    assert ["succeeded: not in force" in line for line in told] == [False] * 4 + [True]
    assert shop.registry.modules.in_force() == []
    shop.check_what_is_left([job_id])
