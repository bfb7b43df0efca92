"""What a takedown binds is said in words wherever it is told of, and nothing that no request must obey is called enforced."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli import build
from server.evidence.bundle import collect, evidence
from server.registry import records
from server.registry.access import Access
from server.registry.audit import Actor, digest_of
from server.registry.lifecycle import Action, InForce, binds, in_force, standing
from server.registry.records import NewModule
from server.registry.refusals import NotAllowed
from server.registry.registry import Registry, open_registry
from server.registry.tables import JobState, Kind, ModuleState, Origin
from server.rules import Rules
from server.settings import Settings
from tests.server.registry.test_registry import claim, made_by, submit
from tests.support.live import ADMIN_KEY, Live, live

ADMIN = Actor("admin", "test")
ROWS = [{"prompt": f"def f{i}():\n", "continuation": f"    return {i} + secret_{i}\n"} for i in range(3)]
MODEL = {"name": "tiny", "fingerprint": "f" * 64}


@pytest.mark.parametrize("state", ModuleState)
@pytest.mark.parametrize("scope", ["", "global", "profile:team", "key:key_1"])
def test_only_an_active_module_with_a_scope_is_enforced(state: ModuleState, scope: str) -> None:
    found, said = in_force(state, scope), binds(state, scope)
    word = standing({"in_force": found, "state": state, "scope": scope})
    if state != ModuleState.ACTIVE:
        assert found == InForce.NONE and said.startswith("nothing") and word == state
    elif scope:
        assert found == InForce.ENFORCED and said.startswith("every request") and word == f"enforced ({scope})"
        assert scope.rpartition(":")[2] in said or scope == "global"
    else:
        assert found == InForce.AVAILABLE and said.startswith("no request but those that name it")
        assert word == "calibrated and available"


def took_down(registry: Registry, **fields: Any) -> tuple[str, str]:
    """A takedown that published its module; (takedown, module)."""
    scope = fields.get("scope", "")
    job_id = submit(registry, options={"replace": True} | ({"scope": scope} if scope else {}))
    held = claim(registry)
    registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, result={}, module=made_by(held, **fields))
    return str(held.takedown_id), str(registry.jobs.get(job_id, 2.0)["module_id"])


def test_a_takedown_tells_what_it_binds_through_its_life(registry: Registry) -> None:
    job_id = submit(registry, options={"scope": "profile:team"})
    held = claim(registry)
    told = registry.takedowns.get(str(held.takedown_id))
    assert (told["in_force"], told["scope"]) == ("none", "profile:team")
    assert told["binds"].startswith("nothing yet; once its module is active, every request under the profile 'team'")
    registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, result={}, module=made_by(held, scope="profile:team"))
    told = registry.takedowns.get(str(held.takedown_id))
    result = registry.jobs.get(job_id, 2.0)["result"]
    for said in (told, told["modules"][0], result):
        assert (said["in_force"], said["scope"]) == ("enforced", "profile:team")
        assert said["binds"].startswith("every request under the profile 'team'")
    module = told["modules"][0]
    registry.modules.act(module["id"], Action.SUSPEND, module["etag"], ADMIN, 2.0)
    told = registry.takedowns.get(str(held.takedown_id))
    assert told["in_force"] == "none" and told["binds"].startswith("nothing while it is suspended")


def test_a_takedown_that_made_no_module_binds_nothing(registry: Registry) -> None:
    submit(registry)
    held = claim(registry)
    registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, result={"outcome": "nothing_to_remove"})
    told = registry.takedowns.get(str(held.takedown_id))
    assert (told["in_force"], told["binds"]) == ("none", "nothing: it has neither module nor guard")


def test_what_follows_from_a_record_is_not_in_the_digests_of_the_audit_trail(registry: Registry) -> None:
    _, module_id = took_down(registry)
    view = registry.modules.get(module_id)
    stored = {name: value for name, value in view.items() if name not in ("in_force", "binds")}
    (*_, last) = registry.audit_of([module_id])
    assert last["action"] == "module.activate" and last["after"] == digest_of(stored)


@pytest.mark.parametrize("kind", Kind)
def test_a_version_that_has_expired_never_stands_in_for_the_one_in_force(registry: Registry, kind: Kind) -> None:
    def add(number: int, now: float, **fields: Any) -> str:
        digest = f"{number:064x}"
        new = NewModule("m", digest, "model", f"objects/{digest}", Origin.TAKEDOWN, scope="global", kind=kind, **fields)
        with registry.transactions.change() as session:
            return records.add(session, new, new.activation, ADMIN, now).id

    first = add(1, 1.0, expires_at=100.0)
    current = add(2, 2.0)
    late = add(3, 200.0, expires_at=100.0)  # a job that ended after that
    add(4, 200.0, expires_at=100.0, activation="shadow")
    with pytest.raises(NotAllowed, match=r"version 1 of 'm' expired at 1970-01-01T00:01:40\+00:00.*options\.replace"):
        registry.modules.rollback(current, "*", ADMIN, 200.0)
    for reference, action in ((first, Action.ACTIVATE), (late, Action.ACTIVATE), (late, Action.SHADOW)):
        with pytest.raises(NotAllowed, match="expired at"):
            registry.modules.act(reference, action, "*", ADMIN, 200.0)
    for reference in (first, late):  # and nobody is told that it may be
        told = registry.modules.get(reference)
        assert told["allowed"] == ["retire"] and told["in_force"] == "none"
        assert told["binds"] == "nothing: it expired at 1970-01-01T00:01:40+00:00, and does not come back"
    waiting = registry.modules.get(add(5, 200.0, expires_at=9e9, activation="manual"))
    assert waiting["allowed"] == ["activate", "retire", "shadow"] and "once active, every request" in waiting["binds"]
    registry.modules.act(waiting["id"], Action.RETIRE, "*", ADMIN, 200.0)
    registry.modules.pass_time(201.0)
    found = [record["state"] for record in registry.modules.versions("m")]
    assert found == ["superseded", "active", "calibrated", "calibrated", "retired"]
    assert registry.modules.rollback(current, "*", ADMIN, 50.0)["id"] == first  # before that it may


def page_of(registry: Registry, takedown: str, settings: Settings) -> tuple[dict[str, Any], str]:
    document = evidence(registry, settings, takedown, MODEL)
    return document["payload"], document["html"]


def test_the_signed_page_of_an_available_module_does_not_claim_that_the_service_keeps_from_anything_else(
    registry: Registry, tmp_path: Path
) -> None:
    payload, html = page_of(registry, took_down(registry)[0], Settings(data_dir=tmp_path))
    assert payload["takedown"]["in_force"] == "available"
    assert "calibrated and available, and not enforced. It binds no request but those that name it" in html
    assert "only there the service keeps from giving these rows back" in html and "is enforced" not in html
    assert "calibrated and available" in html and "<td>active<td>no request" not in html


@pytest.mark.parametrize(
    ("scope", "says"),
    [
        ("global", "the module is enforced. It binds every request to this service"),
        (
            "profile:team",
            "the module is enforced. It binds every request under the profile &#39;team&#39;, and others only",
        ),
        ("key:key_1", "the module is enforced. It binds every request with the key &#39;key_1&#39;, and others only"),
    ],
)
def test_the_signed_page_says_where_a_module_is_enforced(
    registry: Registry, tmp_path: Path, scope: str, says: str
) -> None:
    if scope.startswith("key:"):
        key, _ = Access(registry.transactions).create_key("one", ADMIN, 1.0)
        scope, says = f"key:{key.id}", says.replace("key_1", key.id)
    settings = Settings(data_dir=tmp_path, profiles={"team": Rules()})
    payload, html = page_of(registry, took_down(registry, scope=scope)[0], settings)
    assert says in html and f"enforced ({scope})" in html and "available" not in html
    assert (payload["takedown"]["in_force"], payload["takedown"]["scope"]) == ("enforced", scope)


def test_the_signed_page_of_a_module_out_of_use_says_that_nothing_is_done(registry: Registry, tmp_path: Path) -> None:
    takedown, _ = took_down(registry, scope="global", activation="manual")
    _, html = page_of(registry, takedown, Settings(data_dir=tmp_path))
    assert "the service does nothing about these rows: the takedown binds nothing while it is calibrated" in html
    assert "keeps from giving" not in html


@pytest.mark.parametrize(
    ("scope", "why"), [("key", "is revoked"), ("expired", "has expired"), ("profile:gone", "does not exist")]
)
def test_the_signed_page_of_a_scope_that_reaches_nobody_any_more_calls_nothing_enforced(
    registry: Registry, tmp_path: Path, scope: str, why: str
) -> None:
    if not scope.startswith("profile:"):
        access = Access(registry.transactions)
        key, _ = access.create_key("one", ADMIN, 1.0, expires_at=2.0 if scope == "expired" else None)
        scope = f"key:{key.id}"
        if why == "is revoked":
            access.revoke_key(key.id, ADMIN, 2.0)
    payload, html = page_of(registry, took_down(registry, scope=scope)[0], Settings(data_dir=tmp_path))
    told = payload["takedown"]
    for said in (told, told["modules"][0]):
        assert (said["in_force"], said["scope"]) == ("available", scope)
        assert said["binds"].startswith("no request but those that name it") and said["binds"].endswith(why)
    assert "calibrated and available, and not enforced. It binds no request but" in html and "is enforced" not in html
    assert f"enforced ({scope})" not in html and why in html


def test_the_signed_page_of_a_takedown_names_what_superseded_it_for_the_same_rows(
    registry: Registry, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path)
    first, _ = took_down(registry, scope="global")
    second, module = took_down(registry, scope="global")
    payload, html = page_of(registry, first, settings)
    assert [record["id"] for record in payload["successors"]] == [module]
    assert f"Its module was superseded by version 2 of &#39;m&#39; ({module}), made by takedown {second}, " in html
    assert "That one is enforced (global). It binds every request to this service" in html
    assert (
        "this takedown itself binds nothing: it is superseded" in html and "does nothing about these rows" not in html
    )
    assert page_of(registry, second, settings)[0]["successors"] == []
    registry.modules.act(module, Action.SUSPEND, "*", ADMIN, 3.0)
    assert "the service does nothing about these rows" in page_of(registry, first, settings)[1]


def test_the_signed_page_does_not_name_a_successor_for_other_rows(registry: Registry, tmp_path: Path) -> None:
    first, _ = took_down(registry, scope="global")
    submit(registry, options={"replace": True}, forget_digest="others")
    held = claim(registry)
    registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, result={}, module=made_by(held, scope="global"))
    payload, html = page_of(registry, first, Settings(data_dir=tmp_path))
    assert payload["successors"] == [] and "the service does nothing about these rows" in html


def test_a_module_of_another_model_binds_nothing_and_the_signed_page_says_so(
    registry: Registry, tmp_path: Path
) -> None:
    takedown, module_id = took_down(registry, scope="global")
    says = "nothing here: it is for a model that does not run here"
    for running in ("another", ""):  # a server of another model, and one without a model
        here = Registry(registry.engine, model=running)
        (listed,) = here.takedowns.newest()
        for told in (listed, here.takedowns.get(takedown), here.takedowns.get(takedown)["modules"][0]):
            assert (told["in_force"], told["binds"]) == ("none", says)
        html = page_of(here, takedown, Settings(data_dir=tmp_path))[1]
        assert f"the service does nothing about these rows: the takedown binds {says}" in html
        assert "enforced" not in html and "active" in html
    there = Registry(registry.engine, model="model").takedowns.get(takedown)
    assert (there["in_force"], there["modules"][0]["id"]) == ("enforced", module_id)


def test_evidence_names_the_rules_that_demand_the_module(registry: Registry, tmp_path: Path) -> None:
    takedown, _ = took_down(registry)
    settings = Settings(
        data_dir=tmp_path, profiles={"team": Rules(modules={"m": 1.0}), "other": Rules(modules={"x": 1.0})}
    )
    payload = collect(registry, settings, takedown, MODEL)
    assert payload["named_by"] == ["profile:team"]
    assert "Rules that name it, and bind what they apply to: profile:team." in page_of(registry, takedown, settings)[1]


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server without a worker."""
    with live(checkpoint, tmp_path_factory.mktemp("force"), profiles={"team": {}}) as server:
        yield server


def test_a_post_without_a_scope_is_answered_with_a_warning(running: Live) -> None:
    for options in ({"dry_run": True, "protect": "module"}, {"protect": "module"}):
        answer = running.admin("/takedowns", {"name": "open", "rows": ROWS, "options": options}).body
        assert (answer["in_force"], answer["scope"]) == ("none", None)
        assert answer["binds"] == (
            "nothing yet; once its module is active, no request but those that name it, themselves or by a profile, key or policy"
        )
        (warning,) = answer["warnings"]
        assert "options.scope: none was given" in warning and "not enforced" in warning
    told = running.admin(f"/takedowns/{answer['takedown_id']}").body
    assert (told["in_force"], told["binds"]) == ("none", answer["binds"])


def test_a_post_with_a_scope_is_answered_without_one(running: Live) -> None:
    body = {"name": "scoped", "rows": ROWS, "options": {"scope": "profile:team", "protect": "module"}}
    answer = running.admin("/takedowns", body).body
    assert answer["warnings"] == [] and answer["scope"] == "profile:team"
    assert "once its module is active, every request under the profile 'team'" in answer["binds"]


def test_a_next_version_that_would_end_enforcement_is_warned_of(running: Live) -> None:
    registry, fingerprint = running.service.registry, running.service.loaded.identity.fingerprint
    options: dict[str, Any] = {"scope": "profile:team", "protect": "module"}
    posted = running.admin("/takedowns", {"name": "bound", "rows": ROWS, "options": options}).body
    while (held := claim(registry, now=9e9)).job_id != posted["job_id"]:
        registry.jobs.finish(held, JobState.FAILED, 9e9, error="not this one")
    made = made_by(held, fingerprint=fingerprint, scope="profile:team")
    registry.jobs.finish(held, JobState.SUCCEEDED, 9e9, result={}, module=made)
    listed = running.admin("/modules?state=all&name=bound").body["data"]
    assert [(module["in_force"], module["binds"][:13]) for module in listed] == [("enforced", "every request")]
    options = {"replace": True, "dry_run": True, "protect": "module"}
    again = {"name": "bound", "rows": ROWS, "options": options}
    _, loses = running.admin("/takedowns", again).body["warnings"]
    assert "version 1 of 'bound' is enforced and binds every request under the profile 'team'" in loses
    options["scope"] = "profile:team"
    assert running.admin("/takedowns", again).body["warnings"] == []


def run(running: Live, *arguments: str) -> Any:
    done = CliRunner().invoke(build(), [*arguments, "--url", running.url, "--key", ADMIN_KEY])
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_the_commands_tell_what_a_takedown_and_a_module_bind(running: Live, rows: Path) -> None:
    done = run(
        running, "takedown", "submit", str(rows), "--name", "script", "--protect", "module"
    )  # no terminal: nothing is asked
    assert "nothing yet; once its module is active, no request but those that name it" in done.stdout
    assert "warning: options.scope: none was given" in done.stderr
    said = run(running, "takedown", "submit", str(rows), "--name", "said", "--protect", "module", "--scope", "none")
    assert "warning" not in said.stderr
    guard = {"scope": "global", "protect": "guard", "guard": {"run": 8}}
    assert running.admin("/takedowns", {"name": "held", "rows": ROWS, "options": guard}).status == 202
    freed = ("--name", "held", "--protect", "guard", "--guard-run", "8", "--replace", "--scope", "none")
    said = run(running, "takedown", "submit", str(rows), *freed)
    assert "warning: options.scope: version 1" in said.stderr and "none was given" not in said.stderr
    takedown = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("takedown_id"))
    shown = run(running, "takedown", "show", takedown).stdout
    assert "in_force           none" in shown and "once its module is active, no request but" in shown
    lines = run(running, "module", "list").stdout.splitlines()  # whole, however narrow the screen
    (line,) = [line.split() for line in lines if line.startswith("one ")]
    assert line[:7] == ["one", "module", "1", "calibrated", "and", "available", "True"] and line[-2].startswith("mod_")
    assert len(line[-1]) == 12
    shown = run(running, "module", "show", "one").stdout
    digest = json.loads(run(running, "module", "show", "one", "--json").stdout)["digest"]
    assert "binds              no request but those" in shown and f"digest             {digest}" in shown


def test_on_a_terminal_the_scope_is_asked_for(running: Live, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    try:
        os.write(ours, b"everybody\nprofile:team\n")  # the first is no scope, and is asked for again
        with os.fdopen(theirs, "r+b", buffering=0) as raw:
            screen = io.TextIOWrapper(raw, write_through=True)
            monkeypatch.setattr(sys, "stdin", screen)
            monkeypatch.setattr(sys, "stdout", screen)
            code = build()(
                [
                    "takedown",
                    "submit",
                    str(rows),
                    "--name",
                    "asked",
                    "--guard-run",
                    "8",
                    "--url",
                    running.url,
                    "--key",
                    ADMIN_KEY,
                ],
                standalone_mode=False,
            )
            assert not code  # else what is waited for never comes
            told = ""
            while "every request under the profile 'team'" not in told:  # it comes in parts
                told += os.read(ours, 100_000).decode()
    finally:
        os.close(ours)
    assert "Which requests must it bind?" in told and "'everybody' is none of these" in told
    assert "every request under the profile 'team'" in told
    newest = running.admin("/takedowns?limit=1").body["data"][0]
    assert (newest["name"], newest["options"]) == ("asked", {"scope": "profile:team", "guard": {"run": 8}})


def test_a_server_of_another_model_says_at_its_start_what_it_does_without(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = open_registry(Settings(data_dir=tmp_path / "data"))
    for number in range(7):
        origin = Origin.SHIPPED if number == 6 else Origin.DROPPED
        made = NewModule(f"m{number}", f"{number:064x}", MODEL["fingerprint"], f"m{number}.safetensors", origin)
        registry.modules.adopt(made, 1.0)
    registry.close()
    with caplog.at_level(logging.WARNING, "unbind"), live(checkpoint, tmp_path, ("own",)) as running:
        assert running.complete(headers={"X-Unbind-Modules": "own"}).status == 200
        told = {one["name"]: one for one in running.admin("/modules?state=all").body["data"]}
        assert told["own"]["in_force"] == "available" and not told["m0"]["loaded"]
        assert (told["m0"]["in_force"], told["m0"]["binds"][:12]) == ("none", "nothing here")
    (said,) = [record.getMessage() for record in caplog.records if "for another model" in record.getMessage()]
    assert "than 'tiny', and without effect here: m0, m1, m2, m3, m4 and 1 more. " in said and "--adopt" in said


def test_a_server_that_has_all_of_its_modules_warns_of_none(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "unbind"), live(checkpoint, tmp_path, ("own",)):
        pass
    assert "another model" not in caplog.text
