"""Takedowns that join others over HTTP: whose rows they have, whom they bind, and what is refused."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.api.admin.warned import superseding_of
from server.cli import build
from server.registry.files import forget_file
from server.registry.private.files import TakedownFiles
from server.registry.records import NewModule
from server.registry.registry import Registry
from server.registry.tables import JobState, Origin
from tests.support.live import ADMIN_KEY, Answer, Live, live, until
from unbind_core.rows import ForgetRow, forget_digest

_serial = itertools.count()


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server without a worker, whose modules are records alone."""
    settings = {"profiles": {"team": {}, "named": {"modules": {"by-rule": 1.0}}}}
    with live(checkpoint, tmp_path_factory.mktemp("joined"), **settings) as server:
        for name, scope in (("alpha", "global"), ("beta", "global"), ("of-team", "profile:team"), ("by-rule", None)):
            active(server, name, scope)
        yield server


def rows(name: str) -> list[dict[str, str]]:
    return [{"prompt": f"def {name}{i}():\n", "continuation": f"    return {i}\n"} for i in range(3)]


def active(server: Live, name: str, scope: str | None = "global", joins: Sequence[str] = (), **fields: Any) -> str:
    """A takedown whose module is active, as a worker would have made it; its id."""
    options = {"protect": "module", "replace": True, "joins": joins, **({"scope": scope} if scope else {})}
    posted = server.admin("/takedowns", {"name": name, "rows": rows(name), "options": options})
    assert posted.status == 202, posted.raw
    return made(server, name, scope, **fields)


def made(server: Live, name: str, scope: str | None, **fields: Any) -> str:
    """The takedown of the job that waits, once that has made its module."""
    registry, now = server.service.registry, time.time()
    held = registry.jobs.claim("w", now, 60.0, 3)
    assert held is not None and held.module == name
    module = NewModule(
        name=name,
        digest=f"{next(_serial):064x}",
        fingerprint=server.service.model_fingerprint,
        file=f"objects/{name}",
        origin=Origin.TAKEDOWN,
        job_id=held.job_id,
        takedown_id=held.takedown_id,
        scope=scope or "",
        **fields,
    )
    registry.jobs.finish(held, JobState.SUCCEEDED, now, result={}, module=module)
    return str(held.takedown_id)


def act(server: Live, name: str, action: str) -> Answer:
    """A change of a module's state."""
    path = f"/admin/v1/modules/{name}/{action}"
    return server.call(path, key=ADMIN_KEY, method="POST", headers={"If-Match": "*"})


def join(server: Live, *joins: str, more: Any = (), name: str = "joined", **options: Any) -> Answer:
    body = {"name": name, "options": {"joins": joins, "protect": "module", "dry_run": True, **options}}
    return server.admin("/takedowns", {**body, **({"rows": more} if more else {})})


def test_the_rows_of_all_are_forgotten_and_bind_what_they_bound(running: Live) -> None:
    takedown = next(one for one in running.admin("/takedowns").body["data"] if one["name"] == "beta")
    answer = join(running, "alpha", takedown["id"], "beta", more=[*rows("alpha")[:1], *rows("more")]).body
    assert (answer["rows"], answer["duplicates_dropped"], answer["scope"]) == (9, 1, "global")
    assert join(running, "of-team").body["scope"] == "profile:team"
    assert join(running, "of-team", "alpha", scope="global").body["scope"] == "global"


@pytest.mark.parametrize(
    ("field", "says", "joins", "options"),
    [
        ("joins.1", "no module of 'nobody' is active here", ["alpha", "nobody"], {}),
        ("joins.0", "came as a file", ["shipped"], {}),
        ("scope", "do not bind the same requests", ["alpha", "of-team"], {}),
        ("scope", "would be superseded by one that binds every request under the profile", ["alpha"], {"scope": "profile:team"}),
        ("scope", "profile:named demands 'by-rule'", ["by-rule"], {}),
        ("expires_at", "do not come back", ["alpha"], {"expires_at": "2999-01-01T00:00:00Z"}),
        ("joins", "says how a module is fitted", ["alpha"], {"protect": "guard"}),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_refused_by_its_field(
    running: Live, field: str, says: str, joins: list[str], options: dict[str, Any]
) -> None:
    if "shipped" in joins:
        new = NewModule("shipped", "f" * 64, running.service.model_fingerprint, "shipped.safetensors", Origin.DROPPED)
        running.service.registry.modules.adopt(new, 1.0)
    refused = join(running, *joins, **options)
    assert (refused.status, refused.error["param"]) == (400, f"options.{field}"), refused.raw
    assert refused.error["message"].startswith(f"options.{field}: ") and says in refused.error["message"]


def waiting(running: Live) -> list[str]:
    return [job["id"] for job in running.admin("/jobs").body["data"] if job["state"] == "queued"]


def test_what_is_made_and_not_active_is_refused_by_its_state_with_the_way_to_join_it(running: Live) -> None:
    """As the module that came over the budget, whose verdict is to join small ones."""
    waits = active(running, "waits")
    assert act(running, "waits", "suspend").status == 200
    for named in ("waits", waits):
        refused = join(running, "alpha", named)
        assert (refused.status, refused.error["param"]) == (400, "options.joins.1"), refused.raw
        assert "module 'waits' is suspended, and what is active is joined" in refused.error["message"]
        assert refused.error["message"].endswith("unbind module activate waits --override")
    given = ["module", "activate", "waits", "--url", running.url, "--key", ADMIN_KEY]
    told = CliRunner().invoke(build(), given)  # which a job decides
    assert told.exit_code == 0 and "a job does it: unbind takedown watch job_" in told.stderr, told.output
    assert running.admin(f"/jobs/{told.stderr.split()[-1]}/cancel", {}).status == 200  # no worker is there to take it
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(CliRunner().invoke, build(), [*given, "--watch", "--json"])
        until(lambda: bool(waiting(running)))
        assert running.admin(f"/jobs/{waiting(running)[0]}/cancel", {}).status == 200
        told = watching.result()
    assert told.exit_code == 1 and json.loads(told.stdout)["state"] == "cancelled", told.output
    path = "/admin/v1/modules/waits/activate?override=true"
    assert running.call(path, key=ADMIN_KEY, method="POST", headers={"If-Match": "*"}).status == 200
    assert join(running, "alpha", waits).status == 200


def test_what_can_be_no_name_is_refused_as_one_that_is_not_there(
    checkpoint: Path, tmp_path: Path, registry: Registry, database_url: str
) -> None:
    registry.close()  # it has made what a database of several servers holds at first
    with live(checkpoint, tmp_path / "server", database_url=database_url) as server:
        for name in ("a\0b", "a/../b", "50%", "'\"", ""):
            refused = join(server, name)
            assert (refused.status, refused.error["param"]) == (400, "options.joins.0"), refused.raw


def test_a_rule_that_demands_the_version_before_goes_on_to_bind(running: Live) -> None:
    answer = join(running, "by-rule", name="by-rule", replace=True)
    assert (answer.status, answer.body["scope"]) == (200, None), answer.raw
    assert not any("by-rule' has no guard" in warning for warning in answer.body["warnings"])


def test_what_is_joined_without_a_guard_is_told_to_hold_meanwhile(running: Live) -> None:
    (said,) = (text for text in join(running, "alpha", protect=None).body["warnings"] if "no guard" in text)
    assert "only what it joins holds before the module is active" in said


def test_a_rule_that_demands_what_is_superseded_is_warned_of(running: Live) -> None:
    warnings = join(running, "by-rule", "alpha", scope="global").body["warnings"]
    (said,) = (warning for warning in warnings if warning.startswith("options.joins"))
    assert "profile:named demands 'by-rule'" in said and "get 503" in said


def test_neither_rows_nor_joins_is_an_error_of_rows(running: Live) -> None:
    for body in ({"name": "none"}, {"name": "none", "rows": []}):
        refused = running.admin("/takedowns", body)
        assert (refused.status, refused.error["param"]) == (400, "rows"), refused.raw


def test_rows_that_were_purged_cannot_be_joined(running: Live) -> None:
    takedown = active(running, "gone")
    running.admin(f"/takedowns/{takedown}/purge", method="POST")
    refused = join(running, "gone")
    assert refused.status == 400 and "were deleted" in refused.error["message"], refused.raw


def test_rows_of_which_some_are_gone_are_not_joined(running: Live) -> None:
    registry, takedown = running.service.registry, active(running, "damaged")
    path = forget_file(running.service.settings.data_dir, registry.takedowns.get(takedown)["forget_digest"])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    refused = join(running, "damaged")
    assert (refused.status, refused.error["param"]) == (400, "options.joins"), refused.raw
    assert "its file was damaged; restore it" in refused.error["message"]


def test_rows_that_are_purged_while_they_are_joined_are_not_kept_after_all(
    running: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    takedown, files = active(running, "going"), TakedownFiles(running.service.settings)

    def purging(*given: Any) -> list[str]:
        kept = running.admin(f"/takedowns/{takedown}/purge", method="POST").body["rows_kept_by"]
        assert kept == []
        return superseding_of(*given)

    monkeypatch.setattr("server.api.admin.takedowns.superseding_of", purging)
    refused = join(running, "going", name="comes", more=rows("comes"), dry_run=False)
    assert (refused.status, refused.error["code"]) == (409, "not_allowed"), refused.raw
    assert f"the rows of {takedown} have been deleted meanwhile" in refused.error["message"]
    assert running.service.registry.takedowns.get(takedown)["joined_by"] == []
    digest = forget_digest([ForgetRow(**row) for name in ("going", "comes") for row in rows(name)])
    assert not files.has_forget(digest)


def test_a_module_that_expires_is_not_joined(running: Live) -> None:
    active(running, "ends", expires_at=time.time() + 3600)
    refused = join(running, "ends")
    assert refused.status == 400 and "forgotten for good" in refused.error["message"], refused.raw


def test_whoever_takes_what_joins_others_out_of_use_or_leaves_it_out_is_told_of_them(running: Live) -> None:
    for name in ("part-1", "part-2"):
        active(running, name)
    active(running, "whole", joins=["part-1", "part-2"])
    kept, freed = (join(running, *joins, name="whole", replace=True) for joins in (["whole"], ["alpha"]))
    said = "version 1 of 'whole' stands in for part-1, part-2, and the version that supersedes it will not"
    assert not any(said in warning for warning in kept.body["warnings"])
    assert any(said in warning for warning in freed.body["warnings"]), freed.raw
    for action in ("suspend", "retire"):
        done = act(running, "whole", action)
        assert done.status == 200 and "it has the rows of part-1, part-2, which stay" in done.body["warnings"][0], (
            done.raw
        )
    done = act(running, "alpha", "suspend")
    assert done.status == 200 and "warnings" not in done.body
    act(running, "alpha", "activate?override=true")


def test_what_never_was_active_is_not_said_to_have_stood_in_for_any(running: Live) -> None:
    active(running, "small")
    active(running, "large", joins=["small"])
    options = {"protect": "module", "joins": ["small"], "scope": "global"}
    assert running.admin("/takedowns", {"name": "spare", "options": options}).status == 202
    made(running, "spare", "global", activation="manual")
    assert "warnings" not in act(running, "spare", "shadow").body  # "large" stands in for it
    act(running, "large", "retire")
    (said,) = act(running, "spare", "retire").body["warnings"]
    assert said.startswith("it has the rows of small, which stay superseded")


def test_the_same_request_again_gives_the_same_job_though_what_it_joined_is_superseded_by_now(running: Live) -> None:
    active(running, "again-1")
    options = {"joins": ["again-1"], "protect": "module", "dry_run": False}
    body, headers = {"name": "again", "options": options}, {"Idempotency-Key": "once"}

    def post(**others: Any) -> Answer:
        return running.call("/admin/v1/takedowns", {**body, **others}, key=ADMIN_KEY, headers=headers)

    first = post().body
    assert first["created"] and post().body["job_id"] == first["job_id"]
    made(running, "again", "global")
    assert {one["name"]: one["state"] for one in running.service.registry.modules.versions("again-1")} == {
        "again-1": "superseded"
    }
    repeated = post()
    assert repeated.status == 202 and not repeated.body["created"], repeated.raw
    assert [repeated.body[name] for name in ("job_id", "rows", "scope")] == [first["job_id"], 3, "global"]
    assert post(name="another").status == 409


def test_one_takedown_is_withdrawn_and_the_others_are_joined_anew(running: Live) -> None:
    parts = [active(running, name) for name in ("stays-1", "stays-2", "goes")]
    active(running, "three", joins=["stays-1", "stays-2", "goes"])
    assert act(running, "goes", "retire").status == 200
    again = join(running, "stays-1", parts[1], name="three", replace=True)
    assert (again.status, again.body["rows"]) == (200, 6), again.raw
    assert not any("stands in for" in warning for warning in again.body["warnings"])
    refused = join(running, "goes", name="three", replace=True)
    assert refused.status == 400 and "no module of 'goes' is active here" in refused.error["message"]
    active(running, "three", joins=["stays-1", "stays-2"])
    states = {f"{one['name']}@{one['version']}": one["state"] for one in running.service.registry.modules.versions()}
    assert states["three@2"] == "active" and {states["stays-1@1"], states["stays-2@1"]} == {"superseded"}
    assert states["goes@1"] == "retired"
    act(running, "three", "suspend")
    assert join(running, "stays-1").status == 400  # which nothing stands in for now


def test_the_command_line_joins_and_the_takedown_says_what(running: Live) -> None:
    asked = [
        "takedown",
        "join",
        "alpha",
        "beta",
        "--name",
        "pair",
        "--note",
        "fewer gates",
        "--protect",
        "module",
        "--json",
    ]
    done = CliRunner().invoke(build(), [*asked, "--url", running.url, "--key", ADMIN_KEY])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["module"], answer["rows"], answer["scope"]) == ("pair", 6, "global")
    told = running.admin(f"/takedowns/{answer['takedown_id']}").body
    parts = {one["name"]: one["id"] for one in running.admin("/takedowns").body["data"]}
    assert (
        told["options"]["joins"] == sorted([parts["alpha"], parts["beta"]]) and told["notice"]["note"] == "fewer gates"
    )
    assert told["options"]["protect"] == "module"
    assert running.admin(f"/takedowns/{parts['alpha']}").body["joined_by"] == [answer["takedown_id"]]
