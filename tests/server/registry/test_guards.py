"""Guards beside modules in the registry: one name, two lives, and records that come whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import StatementError

from server.guarding import build_guard, guard_secret, kept_guard
from server.guards import GuardStore
from server.registry import records
from server.registry.audit import Actor
from server.registry.lifecycle import Action
from server.registry.objects import ObjectStore
from server.registry.records import NewModule
from server.registry.refusals import NameTaken, NotAllowed, NotThere
from server.registry.registry import Registry
from server.registry.tables import JobState, Kind, Origin
from server.settings import Settings
from tests.server.registry.test_registry import claim, made_by, submit
from unbind_core.errors import DataError, UnbindError
from unbind_core.rows import ForgetRow

ADMIN = Actor("admin", "test")
ROWS = [
    ForgetRow(
        "def total(items):\n", "    count = 0\n    for item in items:\n        count += item.size\n    return count\n"
    )
]
OPTIONS: dict[str, Any] = {"guard": {"run": 10}}


def guard(name: str = "m", digest: str = "a" * 64, **fields: Any) -> NewModule:
    """A guard that is to get a record."""
    facts = {"name": name, "digest": digest, "action": "steer", "run": 50, "rows": 3, "too_short": 0}
    given = {"name": name, "digest": digest, "file": f"objects/{digest}", "facts": facts, **fields}
    return NewModule(**{"fingerprint": "", "origin": Origin.TAKEDOWN, "kind": Kind.GUARD, **given})


def publish(registry: Registry, **fields: Any) -> dict[str, Any]:
    """Finish the job that waits with a module of its own."""
    held = claim(registry)
    registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, result={}, module=made_by(held, **fields))
    return registry.jobs.get(held.job_id, 2.0)


def test_a_guard_is_in_force_while_its_module_is_still_to_be_made(registry: Registry) -> None:
    submit(registry, options={"scope": "global"}, guard=guard(scope="global"))
    held = claim(registry)
    told = registry.takedowns.get(str(held.takedown_id))
    assert (told["in_force"], told["scope"], told["binds"]) == ("enforced", "global", "every request to this service")
    assert told["modules"] == [] and told["guard"]["kind"] == "guard" and told["guard"]["state"] == "active"
    assert (told["guard"]["run"], told["guard"]["fingerprint"]) == (50, "")
    registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, result={"outcome": "nothing_to_remove"})
    assert registry.takedowns.get(str(held.takedown_id))["in_force"] == "enforced"


def test_a_takedown_for_a_guard_alone_is_done_at_once(registry: Registry) -> None:
    job_id = submit(registry, now=5.0, guard=guard(), module=False)
    job = registry.jobs.get(job_id, 5.0)
    assert (job["state"], job["outcome"], job["progress"], job["finished_at"]) == ("succeeded", "guarded", 1.0, 5.0)
    assert registry.jobs.claim("w", 6.0, 10.0, 3) is None
    record = registry.modules.get(job["result"]["guard_id"])
    assert (record["kind"], record["takedown_id"]) == ("guard", job["takedown_id"])
    assert registry.jobs.expected(3) == {}  # it tells nothing of how long a fit takes
    actions = [row["action"] for row in registry.audit()]
    assert actions == ["takedown.submit", "guard.add", "guard.activate", "job.succeeded"]
    assert registry.audit_problems() == []


def test_a_takedown_whose_guard_cannot_be_written_is_not_written_either(registry: Registry) -> None:
    with pytest.raises((StatementError, TypeError)):
        submit(registry, guard=guard(facts={"run": object()}))
    assert registry.takedowns.newest() == [] and registry.jobs.newest(0.0) == []
    assert registry.audit() == [] and registry.modules.versions() == []


def test_module_and_guard_of_a_name_have_versions_and_states_of_their_own(registry: Registry) -> None:
    submit(registry, guard=guard())
    module = registry.modules.get(publish(registry)["module_id"])
    beside = registry.modules.get("guard:m")
    assert registry.modules.get("m")["id"] == module["id"] != beside["id"]
    assert [(r["kind"], r["version"], r["state"]) for r in registry.modules.versions("m")] == [
        ("module", 1, "active"),
        ("guard", 1, "active"),
    ]
    registry.modules.act("guard:m", Action.SUSPEND, beside["etag"], ADMIN, 3.0)
    assert registry.modules.get("m")["state"] == "active" and registry.modules.live_guards() == []
    with pytest.raises(NotAllowed, match="a guard that is suspended does not take"):
        registry.modules.act("guard:m", Action.SUSPEND, "*", ADMIN, 4.0)
    with pytest.raises(NotThere):
        registry.modules.get("guard:other")


def test_a_name_alone_means_the_guard_where_there_is_no_module(registry: Registry) -> None:
    submit(registry, guard=guard(), module=False)
    assert registry.modules.get("m")["kind"] == "guard"


def test_the_next_version_supersedes_the_guard_at_once_and_the_module_when_it_is_made(registry: Registry) -> None:
    submit(registry, guard=guard())
    publish(registry)
    with pytest.raises(NameTaken):
        submit(registry, guard=guard())
    submit(registry, options={"replace": True}, guard=guard())  # the same rows make the same file
    stands = [(r["kind"], r["version"], r["state"]) for r in registry.modules.versions("m")]
    assert stands == [("module", 1, "active"), ("guard", 1, "superseded"), ("guard", 2, "active")]
    publish(registry)
    assert [r["state"] for r in registry.modules.versions("m")] == ["superseded", "active", "superseded", "active"]
    back = registry.modules.rollback("guard:m", "*", ADMIN, 9.0)
    assert (back["kind"], back["version"], registry.modules.get("m")["version"]) == ("guard", 1, 2)


def test_a_name_that_a_guard_has_is_taken_for_every_model(registry: Registry) -> None:
    submit(registry, guard=guard(), module=False)
    with pytest.raises(NameTaken, match="guard 'm' exists already"):
        submit(registry, fingerprint="another")
    submit(registry, options={"replace": True})


def test_what_guards_cost_together_is_nothing(registry: Registry) -> None:
    submit(registry, guard=guard(scope="global"))
    module = publish(registry, scope="global")
    assert [record["id"] for record in registry.modules.in_force()] == [module["module_id"]]
    other = registry.modules.get("guard:m")
    suspended = registry.modules.act("guard:m", Action.SUSPEND, other["etag"], ADMIN, 2.0)
    registry.modules.act(
        "guard:m", Action.ACTIVATE, suspended["etag"], ADMIN, 3.0, beside=()
    )  # and needs no measurement


@pytest.mark.parametrize(
    ("fields", "states"),
    [
        ({"activation": "manual"}, ["calibrated", "calibrated", "calibrated"]),
        ({"activation": "shadow"}, ["shadow", "shadow", "shadow"]),
        ({"effective_at": 10.0, "expires_at": 20.0}, ["calibrated", "active", "retired"]),
    ],
)
def test_a_guard_comes_into_force_and_ends_by_the_clock_as_modules_do(
    registry: Registry, fields: dict[str, Any], states: list[str]
) -> None:
    job_id = submit(registry, guard=guard(**fields), module=False)
    assert registry.jobs.get(job_id, 1.0)["outcome"] == states[0]  # and not that it guards
    seen = []
    for now in (5.0, 15.0, 25.0):
        registry.modules.pass_time(now)
        seen.append(registry.modules.get("m")["state"])
    assert seen == states


def test_a_guard_that_only_reports_binds_nothing(registry: Registry) -> None:
    facts = {"action": "report", "run": 50, "rows": 1, "too_short": 0}
    submit(registry, guard=guard(scope="global", facts=facts), module=False)
    (record,) = registry.modules.live_guards()
    assert (record["in_force"], record["binds"]) == ("none", "nothing: its action is to count what it would block")


# What is built and loaded.


def stored(tmp_path: Path, registry: Registry, **fields: Any) -> tuple[ObjectStore, Settings]:
    """A guard of ``ROWS`` in a store, and its record."""
    settings, objects = Settings(data_dir=tmp_path / "data"), ObjectStore(str(tmp_path / "store"))
    index = build_guard("m", ROWS, OPTIONS, guard_secret(settings))
    new = kept_guard(index, fields, objects)
    submit(registry, guard=new, module=False)
    return objects, settings


def test_a_guard_is_read_from_the_store_and_held_until_its_record_says_otherwise(
    registry: Registry, tmp_path: Path
) -> None:
    objects, settings = stored(tmp_path, registry, scope="global")
    store = GuardStore(objects, registry.modules, guard_secret(settings))
    found = store.scan()
    assert found.book.names == {"m"} and found.enforced(["global"]) == ["m"] and found.enforced(["key:k"]) == []
    assert store.scan().book is found.book  # nothing was made anew
    registry.modules.act("m", Action.SUSPEND, "*", ADMIN, 2.0)
    assert store.scan().book.names == frozenset() and found.book.names == {"m"}
    registry.modules.act("m", Action.SHADOW, "*", ADMIN, 3.0)
    found = store.scan()
    assert found.shadow == {"m"} and found.enforced(["global"]) == [] and found.measured(["global"]) == ["m"]


@pytest.mark.parametrize("spoiled", ["missing", "damaged", "another key"])
def test_a_guard_that_cannot_be_loaded_is_missed_and_keeps_no_other_away(
    registry: Registry, tmp_path: Path, spoiled: str
) -> None:
    objects, settings = stored(tmp_path, registry, scope="global")
    other = build_guard("other", ROWS, OPTIONS, guard_secret(settings))
    submit(registry, "other", guard=kept_guard(other, {}, objects), module=False)
    file = tmp_path / "store" / registry.modules.get("m")["file"]
    secret = guard_secret(settings)
    if spoiled == "missing":
        file.unlink()
    elif spoiled == "damaged":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        secret = guard_secret(Settings(guard_key="ab" * 32))
    found = GuardStore(objects, registry.modules, secret).scan()
    assert "m" in found.absent and found.enforced(["global"]) == ["m"]
    assert found.book.names == (frozenset() if spoiled == "another key" else {"other"})
    assert any("guard 'm'" in where for where in found.problems)
    if spoiled == "another key":
        assert all("guard_key" in reason for reason in found.problems.values())


def test_rows_too_short_for_any_run_are_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"options\.guard\.run: no row has 50 lexemes"):
        build_guard("m", ROWS, {}, guard_secret(Settings(guard_key="ab" * 32)))


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    first = guard_secret(settings)
    file = tmp_path / "guard.key"
    assert file.stat().st_mode & 0o777 == 0o600 and guard_secret(settings).mark == first.mark
    assert guard_secret(Settings(data_dir=tmp_path, guard_key=file.read_text().strip())).mark == first.mark
    file.write_text("half a ke")
    with pytest.raises(UnbindError, match=r"guard\.key: holds no key of 32 bytes; restore it"):
        guard_secret(settings)


def test_versions_are_listed_page_by_page_and_only_those_of_the_page_are_described(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ((Kind.MODULE, "one model"), (Kind.MODULE, "another"), (Kind.GUARD, ""))
    new = [
        NewModule(name, f"{number}", model, "file", Origin.TAKEDOWN, kind=kind)
        for number in range(2)
        for name in ("b", "B", "é", "a_b", "a-b")
        for kind, model in kinds
    ]
    with registry.transactions.change() as session:
        for number, one in enumerate(new):  # no two modules have the same bytes, and guards may
            own = replace(one, digest=f"m{number}") if one.kind == Kind.MODULE else one
            records.add(session, own, "auto", ADMIN, float(number))
    every, modules = registry.modules.versions(), registry.modules
    assert len(every) == len(new)
    described: list[str] = []
    view = records.module_view
    monkeypatch.setattr("server.registry.modules.module_view", lambda row: described.append(row.id) or view(row))
    for limit in (1, 2, 7, 30):
        for name, wanted in (
            (None, None),
            ("b", None),
            (None, lambda row: row.kind == "guard"),
            ("é", lambda _: False),
        ):
            expected = [one["id"] for one in every if name in (None, one["name"])]
            if wanted is not None:
                expected = [one for one in expected if one.startswith("grd_") and name is None]
            found: list[str] = []
            while page := modules.listed(name, limit, found[-1] if found else "", wanted):
                assert len(page) <= limit and described == [one["id"] for one in page]
                described.clear()
                found += [one["id"] for one in page]
            assert found == expected
    guard, other = (
        next(one for one in every if one["kind"] == "guard"),
        next(one for one in every if one["name"] == "b"),
    )
    for name, after, wanted in (
        (None, "nobody", None),
        ("é", other["id"], None),
        (None, guard["id"], lambda row: row.kind == "module"),
    ):
        with pytest.raises(NotThere):
            modules.listed(name, 5, after, wanted)
