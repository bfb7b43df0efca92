"""Scopes that no request comes under any more: nothing new is bound to them, and nobody is told that what is bound there holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli import build
from tests.support.live import ADMIN_KEY, Answer, Live, live

ROWS = [
    {"text": "def total(items):\n    count = 0\n    for item in items:\n        count += item.size\n    return count\n"}
]
GUARD: dict[str, Any] = {"protect": "guard", "guard": {"run": 8}}


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server without a worker."""
    with live(checkpoint, tmp_path_factory.mktemp("scopes"), profiles={"team": {}}) as server:
        yield server


def post(server: Live, name: str, scope: str, **options: Any) -> Answer:
    """A takedown for a guard alone."""
    return server.admin("/takedowns", {"name": name, "rows": ROWS, "options": {**GUARD, "scope": scope, **options}})


def key(server: Live, **fields: Any) -> str:
    """The id of a new key."""
    return str(server.admin("/keys", {"name": "test", **fields}).body["id"])


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_takedown_is_not_bound_to_a_key_that_nobody_can_use(running: Live, dry_run: bool) -> None:
    revoked, expired = key(running), key(running, expires_in=0.05)
    running.admin(f"/keys/{revoked}", method="DELETE")
    time.sleep(0.06)
    for scope, why in (
        (f"key:{revoked}", f"key '{revoked}' is revoked"),
        (f"key:{expired}", f"key '{expired}' has expired"),
        ("key:nobody", "key 'nobody' does not exist"),
        ("profile:nobody", "profile 'nobody' does not exist"),
    ):
        refused = post(running, "unreached", scope, dry_run=dry_run)
        assert (refused.status, refused.error["param"]) == (400, "options.scope"), refused.raw
        assert f"options.scope: {why}" in refused.error["message"] and "give another scope" in refused.error["message"]
    assert running.admin(f"/policies/key:{revoked}").status == 200  # what was written of it can still be read


@pytest.mark.parametrize("scope", ["global", "profile:team", "key"])
def test_a_takedown_is_bound_to_what_requests_come_under(running: Live, scope: str) -> None:
    scope = f"key:{key(running)}" if scope == "key" else scope
    assert post(running, f"reached-{scope.partition(':')[0]}", scope).body["in_force"] == "enforced"


def act(server: Live, reference: str, action: str) -> Answer:
    """A change of state, of whatever revision there is."""
    path = f"/admin/v1/modules/{reference}/{action}"
    return server.call(path, key=ADMIN_KEY, method="POST", headers={"If-Match": "*"})


def test_a_profile_that_a_guard_is_bound_to_is_not_deleted(running: Live) -> None:
    running.admin("/profiles/bound", {}, "PUT")
    assert post(running, "held", "profile:bound").status == 202
    for change in ((), ("suspend", "shadow")):  # while it holds, and while it counts
        assert all(act(running, "guard:held", action).status == 200 for action in change)
        refused = running.admin("/profiles/bound", method="DELETE")
        assert (refused.status, refused.error["code"]) == (409, "not_allowed"), refused.raw
        said = "guard 'held' would bind no request any more; suspend or retire"
        assert f"profile 'bound': {said}" in refused.error["message"]
    assert act(running, "guard:held", "retire").status == 200
    assert running.admin("/profiles/bound", method="DELETE").status == 200


def test_what_a_job_is_to_bind_and_what_is_due_later_count_as_bound(running: Live) -> None:
    running.admin("/profiles/awaited", {}, "PUT")
    of_a_key = key(running)
    module = {"protect": "module", "guard": None}
    jobs = [
        post(running, f"made-{kind}", scope, **module).body["job_id"]
        for kind, scope in (("profile", "profile:awaited"), ("key", f"key:{of_a_key}"))
    ]
    assert post(running, "due", "profile:awaited", effective_at="2999-01-01T00:00:00Z").status == 202
    said = f"profile 'awaited': guard 'due', module 'made-profile' of {jobs[0]} would bind no request any more"
    assert said in running.admin("/profiles/awaited", method="DELETE").error["message"]
    (warning,) = running.admin(f"/keys/{of_a_key}", method="DELETE").body["warnings"]
    assert f"module 'made-key' of {jobs[1]} bound requests with this key, or were to" in warning
    assert running.admin(f"/jobs/{jobs[0]}/cancel", method="POST").body["state"] == "cancelled"
    assert act(running, "guard:due", "retire").status == 200
    assert running.admin("/profiles/awaited", method="DELETE").status == 200


def test_a_key_is_revoked_whatever_is_bound_to_it_and_what_is_is_warned_of(running: Live) -> None:
    free, bound = key(running), key(running)
    assert post(running, "of-a-key", f"key:{bound}").status == 202
    answer = running.admin(f"/keys/{bound}", method="DELETE")
    (warning,) = answer.body["warnings"]
    assert answer.status == 200 and answer.body["revoked_at"] and "guard 'of-a-key' bound requests with" in warning
    assert running.admin(f"/keys/{free}", method="DELETE").body["warnings"] == []
    guard = running.admin("/modules/guard:of-a-key").body
    takedown = running.admin(f"/takedowns/{guard['takedown_id']}").body
    listed = next(told for told in running.admin("/takedowns").body["data"] if told["id"] == takedown["id"])
    for told in (guard, takedown, listed, running.admin("/modules?name=of-a-key").body["data"][0]):
        assert told["in_force"] == "available" and told["binds"].endswith(f"as key '{bound}' is revoked")
    folder = str(running.service.settings.data_dir)
    said = CliRunner().invoke(build(), ["key", "revoke", bound, "--data-dir", folder])
    assert said.exit_code == 0 and "guard 'of-a-key' bound requests with" in said.stderr and "revoked" in said.stdout
