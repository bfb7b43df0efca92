"""A module's life: what may follow what, on which revision, one loaded version of a name; as a state machine, on every database."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event, update

from server.registry import records
from server.registry.audit import Actor
from server.registry.database import connect, open_database, upgrade
from server.registry.jobs import Claim
from server.registry.lifecycle import ALLOWED, LEADS_TO, LIVE, Action
from server.registry.records import NewModule
from server.registry.refusals import JointOutdated, NotAllowed, NotThere, Stale, Unconditional
from server.registry.registry import Registry
from server.registry.tables import JobKind, JobState, ModuleRow, ModuleState, Origin
from tests.server.registry.test_registry import claim, made_by, submit

ADMIN = Actor("admin", "test")


def make(registry: Registry, name: str = "m", now: float = 0.0, **fields: Any) -> dict[str, Any]:
    """The record of a module that a takedown published."""
    job_id = submit(registry, name, now, options={"replace": True})
    held = claim(registry, now=now)
    registry.jobs.finish(held, JobState.SUCCEEDED, now, module=made_by(held, **fields))
    return registry.modules.get(registry.jobs.get(job_id, now)["module_id"])


def act(registry: Registry, record: dict[str, Any], action: Action, now: float = 1.0) -> dict[str, Any]:
    return registry.modules.act(record["id"], action, record["etag"], ADMIN, now)


def states(registry: Registry, name: str = "m") -> list[str]:
    return [record["state"] for record in registry.modules.versions(name)]


@pytest.mark.parametrize("state", ModuleState)
@pytest.mark.parametrize("action", Action)
def test_every_transition_is_allowed_or_refused_with_what_is_allowed(
    tmp_path: Path, state: ModuleState, action: Action
) -> None:
    registry = Registry(open_database(tmp_path / "r.sqlite"))
    record = make(registry, activation="manual")
    way = {
        ModuleState.CALIBRATED: [],
        ModuleState.SHADOW: [Action.SHADOW],
        ModuleState.ACTIVE: [Action.ACTIVATE],
        ModuleState.SUSPENDED: [Action.ACTIVATE, Action.SUSPEND],
        ModuleState.RETIRED: [Action.RETIRE],
        ModuleState.SUPERSEDED: [Action.ACTIVATE],
    }[state]
    for step in way:
        record = act(registry, record, step)
    if state == ModuleState.SUPERSEDED:
        make(registry)
        record = registry.modules.get(record["id"])
        act(registry, registry.modules.get("m"), Action.SUSPEND)
    assert record["state"] == state and record["allowed"] == sorted(ALLOWED[state])
    if action in ALLOWED[state]:
        assert act(registry, record, action)["state"] == LEADS_TO[action]
    else:
        with pytest.raises(NotAllowed) as refused:
            act(registry, record, action)
        assert all(allowed in str(refused.value) for allowed in ALLOWED[state])
        assert registry.modules.get(record["id"]) == record
    registry.close()


def test_a_new_version_supersedes_and_rollback_brings_the_former_back(registry: Registry) -> None:
    make(registry), make(registry)
    assert states(registry) == ["superseded", "active"]
    third = make(registry)
    assert states(registry) == ["superseded", "superseded", "active"]
    back = registry.modules.rollback("m", third["etag"], ADMIN, 5.0)
    assert back["version"] == 2 and states(registry) == ["superseded", "active", "superseded"]
    first = registry.modules.rollback("m", back["etag"], ADMIN, 6.0)
    assert first["version"] == 1
    with pytest.raises(NotAllowed, match="no superseded version before"):
        registry.modules.rollback("m", first["etag"], ADMIN, 7.0)
    act(registry, first, Action.SUSPEND)
    assert registry.modules.get("m")["version"] == 1  # and not the newest, from which it was rolled back
    assert act(registry, registry.modules.get("m"), Action.ACTIVATE)["version"] == 1


def test_a_change_is_for_the_revision_that_was_seen(registry: Registry) -> None:
    record = make(registry)
    with pytest.raises(Unconditional, match="If-Match"):
        registry.modules.act(record["id"], Action.SUSPEND, None, ADMIN, 1.0)
    changed = act(registry, record, Action.SUSPEND)
    assert changed["etag"] != record["etag"]
    with pytest.raises(Stale, match="changed since"):
        act(registry, record, Action.ACTIVATE)
    assert registry.modules.act("m", Action.ACTIVATE, "*", ADMIN, 2.0)["state"] == "active"
    with pytest.raises(NotThere):
        registry.modules.act("nobody", Action.ACTIVATE, "*", ADMIN, 2.0)


def test_of_racing_changes_on_one_revision_one_wins(registry: Registry) -> None:
    record = make(registry)

    def attempt(action: Action) -> str:
        try:
            return str(act(registry, record, action)["state"])
        except (Stale, NotAllowed):
            return "refused"

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(attempt, [Action.SUSPEND, Action.RETIRE] * 3))
    assert results.count("refused") == 5


def test_shadow_waits_where_a_version_is_active(registry: Registry) -> None:
    make(registry)
    waiting = make(registry, activation="shadow")
    assert states(registry) == ["active", "calibrated"]
    with pytest.raises(NotAllowed, match="version 1 of 'm' is active"):
        act(registry, waiting, Action.SHADOW)
    act(registry, registry.modules.get("m"), Action.SUSPEND)
    assert act(registry, waiting, Action.SHADOW)["state"] == "shadow"
    assert [record["version"] for record in registry.modules.live("model")] == [2]


def test_time_activates_what_is_due_and_retires_what_has_expired(registry: Registry) -> None:
    make(registry, now=0.0)
    make(registry, now=1.0, effective_at=100.0, expires_at=200.0)
    registry.modules.pass_time(99.0)
    assert states(registry) == ["active", "calibrated"]
    registry.modules.pass_time(100.0)
    assert states(registry) == ["superseded", "active"]
    registry.modules.pass_time(200.0)
    assert states(registry) == ["superseded", "retired"]
    actions = [(row["actor"], row["action"]) for row in registry.audit(limit=1000)]
    assert actions.count(("clock", "module.activate")) == 1 and actions.count(("clock", "module.retire")) == 1


def test_found_files_get_records_and_never_displace_a_takedown(registry: Registry) -> None:
    def found(digest: str, file: str = "modules/m.safetensors") -> dict[str, Any]:
        return registry.modules.adopt(NewModule("m", digest, "model", file, Origin.SHIPPED), 1.0)

    assert found("a" * 64)["state"] == "active" and found("a" * 64)["version"] == 1
    assert found("b" * 64)["state"] == "active"  # the file was replaced
    assert states(registry) == ["superseded", "active"]
    make(registry)
    assert found("c" * 64)["state"] == "calibrated"
    assert states(registry) == ["superseded", "superseded", "active", "calibrated"]


class Lifecycle(RuleBasedStateMachine):
    """Random operators on a few names; a plain dictionary says what must have come out."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.registry = Registry(open_database(Path(self.folder.name) / "r.sqlite"), Path(self.folder.name) / "head")
        self.expected: dict[str, tuple[str, int, str]] = {}  # id -> name, version, state
        self.now = 0.0

    def teardown(self) -> None:
        if hasattr(self, "registry"):
            self.registry.close()
            self.folder.cleanup()

    def live(self, name: str) -> str | None:
        return next((i for i, (n, _, state) in self.expected.items() if n == name and state in LIVE), None)

    def supersede(self, name: str) -> None:
        if (other := self.live(name)) is not None:
            self.expected[other] = (name, self.expected[other][1], "superseded")

    @rule(name=st.sampled_from(["a", "b"]), activation=st.sampled_from(["auto", "manual", "shadow"]))
    def publish(self, name: str, activation: str) -> None:
        self.now += 1
        occupied = self.live(name) is not None
        record = make(self.registry, name, self.now, activation=activation)
        state = {"auto": "active", "manual": "calibrated", "shadow": "calibrated" if occupied else "shadow"}[activation]
        if state == "active":
            self.supersede(name)
        versions = [version for n, version, _ in self.expected.values() if n == name]
        self.expected[record["id"]] = (name, max(versions, default=0) + 1, state)

    @precondition(lambda self: self.expected)
    @rule(action=st.sampled_from(list(Action)), which=st.integers(0, 30), stale=st.booleans())
    def change(self, action: Action, which: int, stale: bool) -> None:
        self.now += 1
        identifier = list(self.expected)[which % len(self.expected)]  # in their order: ids are random
        name, version, state = self.expected[identifier]
        record = self.registry.modules.get(identifier)
        if stale:
            with pytest.raises(Stale):
                self.registry.modules.act(identifier, action, '"other-1"', ADMIN, self.now)
            return
        blocked = action == Action.SHADOW and self.live(name) not in (None, identifier)
        if action not in ALLOWED[ModuleState(state)] or blocked:
            with pytest.raises(NotAllowed):
                act(self.registry, record, action, self.now)
            return
        act(self.registry, record, action, self.now)
        if LEADS_TO[action] in LIVE and self.live(name) != identifier:
            self.supersede(name)
        self.expected[identifier] = (name, version, LEADS_TO[action])

    @precondition(lambda self: self.expected)
    @rule(name=st.sampled_from(["a", "b"]))
    def roll_back(self, name: str) -> None:
        self.now += 1
        mine = {i: v for i, (n, v, _) in self.expected.items() if n == name}
        if not mine:
            return
        over = ("superseded", "retired")
        at = mine[self.live(name) or max(mine, key=lambda i: (self.expected[i][2] not in over, mine[i]))]
        former = [i for i, v in mine.items() if v < at and self.expected[i][2] == "superseded"]
        if not former:
            with pytest.raises(NotAllowed):
                self.registry.modules.rollback(name, "*", ADMIN, self.now)
            return
        self.registry.modules.rollback(name, "*", ADMIN, self.now)
        self.supersede(name)
        target = max(former, key=lambda i: mine[i])
        self.expected[target] = (name, mine[target], "active")

    @invariant()
    def records_are_as_expected(self) -> None:
        if not hasattr(self, "registry"):
            return
        records = self.registry.modules.versions()
        assert {r["id"]: (r["name"], r["version"], r["state"]) for r in records} == self.expected
        loaded = [record["name"] for record in self.registry.modules.live("model")]
        assert len(loaded) == len(set(loaded))
        assert self.registry.audit_problems() == []


def test_the_lifecycle_holds_under_any_sequence_of_operators() -> None:
    run_state_machine_as_test(
        Lifecycle,
        settings=settings(
            max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.slow
def test_the_lifecycle_holds_under_many_sequences_of_operators() -> None:
    run_state_machine_as_test(
        Lifecycle,
        settings=settings(
            max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def ready(registry: Registry, name: str, **options: Any) -> Claim:
    """A job whose module is made and not yet published."""
    submit(registry, name, options={"replace": True, **options})
    return claim(registry)


def finish(
    registry: Registry, held: Claim, beside: list[str] | None, now: float = 1.0, **fields: Any
) -> dict[str, Any]:
    module = made_by(held, **fields)
    result = {"joint": {"beside": beside}}
    registry.jobs.finish(held, JobState.SUCCEEDED, now, result=result, module=module, beside=beside)
    return next(record for record in registry.modules.versions() if record["digest"] == module.digest)


def test_a_module_is_activated_only_beside_what_its_joint_cost_was_measured_with(registry: Registry) -> None:
    one, two = ready(registry, "one"), ready(registry, "two")
    first = finish(registry, one, [])
    trail = len(registry.audit(limit=1000))
    with pytest.raises(JointOutdated, match="beside module 'two' these are in force by now: one"):
        finish(registry, two, [])
    assert len(registry.audit(limit=1000)) == trail and len(registry.modules.versions()) == 1
    assert finish(registry, two, [first["digest"]])["state"] == "active"
    three = ready(registry, "three")
    act(registry, registry.modules.get("one"), Action.SUSPEND)
    with pytest.raises(JointOutdated, match="by now: two"):  # fewer than were measured are others than were measured
        finish(registry, three, [first["digest"], registry.modules.get("two")["digest"]])
    assert finish(registry, three, [], activation="manual")["state"] == "calibrated"  # nothing is promised
    assert finish(registry, ready(registry, "four"), None)["state"] == "active"  # whatever it costs
    assert finish(registry, ready(registry, "five"), [], fingerprint="another model")["state"] == "active"
    again = ready(registry, "five")  # a next version is measured without the one that it replaces
    assert finish(registry, again, [], fingerprint="another model")["state"] == "active"


def test_of_takedowns_that_end_together_each_sees_those_before(registry: Registry) -> None:
    jobs = [ready(registry, f"m{number}") for number in range(6)]

    def publish(held: Claim) -> str:
        try:
            return str(finish(registry, held, [])["state"])
        except JointOutdated:
            return "measure again"

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(publish, jobs))
    assert sorted(results) == ["active"] + ["measure again"] * 5


def test_modules_activated_by_hand_at_once_do_not_overlook_each_other(registry: Registry) -> None:
    records = [finish(registry, ready(registry, f"m{number}"), None, activation="manual") for number in range(6)]

    def activate(record: dict[str, Any]) -> str:
        try:
            done = registry.modules.act(record["id"], Action.ACTIVATE, record["etag"], ADMIN, 2.0, beside=())
            return str(done["state"])
        except JointOutdated:
            return "measure first"

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(activate, records))
    assert sorted(results) == ["active"] + ["measure first"] * 5


def test_what_becomes_due_beside_others_than_measured_is_measured_first(registry: Registry) -> None:
    calm, late = ready(registry, "calm"), ready(registry, "late")
    finish(registry, calm, [], effective_at=50.0, fingerprint="another model")
    due = finish(registry, late, [], effective_at=50.0)
    assert due["state"] == "calibrated"
    other = finish(registry, ready(registry, "other"), [])
    for _ in range(2):
        registry.modules.pass_time(60.0)
    assert registry.modules.get("calm")["state"] == "active"
    assert registry.modules.get("late")["state"] == "calibrated"
    held = claim(registry, now=60.0)
    assert (held.kind, held.module_id) == (JobKind.ACTIVATE, due["id"])
    assert registry.jobs.claim("w2", 60.0, 10.0, 3) is None  # asked for once
    with pytest.raises(JointOutdated):
        registry.jobs.finish(held, JobState.SUCCEEDED, 61.0, activate=True, beside=[])
    registry.jobs.finish(held, JobState.SUCCEEDED, 61.0, result={}, activate=True, beside=[other["digest"]])
    assert registry.modules.get("late")["state"] == "active"
    finish(registry, ready(registry, "any", override=True), None, now=62.0, effective_at=70.0)
    registry.modules.pass_time(80.0)
    assert registry.modules.get("any")["state"] == "active"  # whatever it costs


@pytest.fixture
def two_servers(database_url: str) -> Iterator[tuple[Registry, Registry]]:
    """What two servers hold of one database, of either kind."""
    engine = connect(database_url)
    upgrade(engine)
    both = Registry(engine), Registry(open_database(database_url))
    yield both
    for registry in both:
        registry.close()


def test_live_records_are_as_they_stand_now_whoever_wrote_them(
    two_servers: tuple[Registry, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = two_servers
    for name in ("one", "two"):
        make(ours, name)
    fingerprint = ours.modules.get("one")["fingerprint"]
    before = ours.modules.live(fingerprint)
    assert [record["name"] for record in before] == ["one", "two"]
    assert all(again is record for again, record in zip(ours.modules.live(fingerprint), before, strict=True))
    with theirs.transactions.change() as session:  # by hand, without a new revision or an entry of the trail
        session.execute(update(ModuleRow).where(ModuleRow.name == "one").values(scope="global", digest="0" * 64))
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: 1e6)  # a minute and more
        changed, same = ours.modules.live(fingerprint)
    assert (changed["scope"], changed["digest"], changed["in_force"]) == ("global", "0" * 64, "enforced")
    assert same is before[1]
    act(theirs, theirs.modules.get("two"), Action.SUSPEND)
    assert [record["name"] for record in ours.modules.live(fingerprint)] == ["one"]
    act(theirs, theirs.modules.get("two"), Action.ACTIVATE)
    assert ours.modules.live(fingerprint) == [theirs.modules.get(name) for name in ("one", "two")]


def test_a_look_reads_no_records_until_somebody_changes_one_or_one_is_due(
    two_servers: tuple[Registry, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    ours, theirs = two_servers
    make(theirs, "one")
    make(theirs, "short", expires_at=100.0)
    fingerprint = ours.modules.get("one")["fingerprint"]
    asked: list[str] = []
    event.listen(ours.engine, "before_cursor_execute", lambda *told: asked.append(told[2]))

    def look(now: float) -> tuple[list[str], bool]:
        """Names, and whether the table of modules was read."""
        asked.clear()
        ours.modules.pass_time(now)
        names = [record["name"] for record in ours.modules.live(fingerprint)]
        ours.modules.live_guards()
        return names, any("FROM modules" in statement for statement in asked)

    assert look(50.0) == (["one", "short"], True)
    assert look(51.0) == (["one", "short"], False)
    make(theirs, "two", now=52.0)
    assert look(53.0) == (["one", "short", "two"], True)
    assert look(100.0) == (["one", "two"], True)
    look(101.0)
    assert look(102.0) == (["one", "two"], False)
    act(theirs, theirs.modules.get("one"), Action.SUSPEND)
    assert look(103.0) == (["two"], True)
    ours.modules.withheld[theirs.modules.get("two")["id"]] = (ADMIN, 104.0)
    assert [record["name"] for record in ours.modules.live(fingerprint)] == []  # in this process, at once


def test_every_change_of_a_record_is_told_of_in_the_trail(tmp_path: Path) -> None:
    """So that the trail's end says whether records are as they were."""
    registry = Registry(open_database(tmp_path / "r.sqlite"))
    digest = "d" * 64
    registry.modules.adopt(NewModule("m", digest, "model", "old", Origin.DROPPED), 1.0)
    before = registry.audit()[-1]["id"]
    registry.modules.adopt(NewModule("m", digest, "model", "new", Origin.DROPPED), 2.0)
    (entry,) = registry.audit(after=before)
    assert (entry["action"], entry["subject"]) == ("module.place", registry.modules.get("m")["id"])
    registry.modules.adopt(NewModule("m", digest, "model", "new", Origin.DROPPED), 3.0)
    assert registry.audit(after=entry["id"]) == [] and registry.modules.get("m")["file"] == "new"


def test_a_name_means_the_version_for_the_model_that_runs_here(tmp_path: Path) -> None:
    """Several names, as ids are drawn and say nothing of what comes first."""
    engine = open_database(tmp_path / "r.sqlite")
    at = {model: Registry(engine, model=model) for model in ("a", "b", "c")}
    for name in ("one", "two", "three", "four", "five", "six"):
        for number, model in enumerate("ab"):
            new = NewModule(
                name, f"{name}{model}".ljust(64, "0"), model, "objects/o", Origin.TAKEDOWN, activation="auto"
            )
            with at["a"].transactions.change() as session:
                records.add(session, new, "auto", ADMIN, float(number))
        assert [at[model].modules.get(name)["fingerprint"] for model in "abc"] == ["a", "b", "b"]
        theirs = act(at["a"], at["b"].modules.get(name), Action.SUSPEND)
        assert theirs["fingerprint"] == "b" and at["a"].modules.get(name)["state"] == "active"
        assert [at[model].modules.get(name)["fingerprint"] for model in "abc"] == ["a", "b", "a"]
        back = at["b"].modules.act(name, Action.ACTIVATE, theirs["etag"], ADMIN, 2.0)
        assert (back["fingerprint"], back["state"]) == ("b", "active")
