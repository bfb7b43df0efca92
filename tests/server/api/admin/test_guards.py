"""Guards over HTTP: in force with the answer to the POST, by every name and scope a module has, and never left out in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli import build
from server.cli.client import Client
from server.guards import GuardStore
from tests.support.live import ADMIN_KEY, Answer, Live, live
from unbind_core.guard.lexemes import spelt

CODE = """def merge(first, second):
    merged = dict(first)
    for name, value in second.items():
        if name in merged and isinstance(value, list):
            merged[name] = merged[name] + value
        else:
            merged[name] = value
    return merged


def split(line, size):
    return [line[at : at + size] for at in range(0, len(line), size)]
"""
ROWS = [{"text": CODE}, {"prompt": "a = 1\n", "continuation": "b = 2\n"}]
ALONE = {"protect": "guard"}


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server without a worker."""
    with live(checkpoint, tmp_path_factory.mktemp("guards"), profiles={"team": {}}) as server:
        yield server


def post(server: Live, name: str, rows: Any = ROWS, **options: Any) -> Answer:
    """A takedown."""
    return server.admin("/takedowns", {"name": name, "rows": rows, "options": options})


def act(server: Live, reference: str, action: str) -> Answer:
    """A change of state, of whatever revision there is."""
    path = f"/admin/v1/modules/{reference}/{action}"
    return server.call(path, key=ADMIN_KEY, method="POST", headers={"If-Match": "*"})


def applied(answer: Answer) -> list[str]:
    """Modules and guards in the answer's header, without their digests."""
    assert answer.status == 200, answer.raw
    return sorted(label.split("@")[0] for label in answer.headers.get("x-unbind-modules", "").split(",") if label)


def test_a_guard_applies_from_the_answer_to_its_takedown_on(running: Live) -> None:
    answer = post(running, "both", scope="profile:team")
    assert answer.status == 202 and answer.body["state"] == "queued"
    guard = answer.body["guard"]
    assert (guard["action"], guard["run"], guard["rows"], guard["too_short"]) == ("steer", 50, 1, 1)
    assert answer.body["in_force"] == "enforced" and answer.body["binds"].startswith("every request under the profile")
    assert any("1 of 2 rows have fewer than 50 lexemes" in said for said in answer.body["warnings"])
    enforced = running.complete(path="/p/team/v1/completions", max_tokens=1)
    assert applied(enforced) == ["both:guard"] and f"@{guard['digest'][:12]}" in enforced.headers["x-unbind-modules"]
    assert applied(running.complete(max_tokens=1)) == []
    assert applied(running.complete(max_tokens=1, unbind={"modules": ["both", "one"]})) == ["both:guard", "one"]
    refused = running.complete(path="/p/team/v1/completions", unbind={"modules": ["-both"]})
    assert (refused.status, refused.error["code"]) == (403, "module_enforced")


def test_the_list_of_takedowns_says_what_each_binds_and_where_its_job_is(running: Live) -> None:
    for name, options in (("listed", {"scope": "profile:team"}), ("listed-alone", {**ALONE, "scope": None})):
        assert post(running, name, **options).status == 202
    for entry in running.admin("/takedowns").body["data"]:
        whole = running.admin(f"/takedowns/{entry['id']}").body
        job = running.admin(f"/jobs/{whole['jobs'][-1]}").body
        assert {name: entry[name] for name in entry if name != "job"}.items() <= whole.items()
        assert entry["job"].items() <= job.items() and entry["job"]["state"] in ("queued", "succeeded")
    assert [entry["in_force"] for entry in running.admin("/takedowns?limit=2").body["data"]] == [
        "available",
        "enforced",
    ]


def test_the_list_of_takedowns_is_read_to_its_end_page_by_page(running: Live) -> None:
    for number in range(3):
        assert post(running, f"page-{number}", **ALONE).status == 202
    every = [entry["id"] for entry in running.admin("/takedowns?limit=1000").body["data"]]
    pages: list[str] = []
    more, after = True, ""
    while more:
        page = running.admin(f"/takedowns?limit=2&after={after}").body
        pages += [entry["id"] for entry in page["data"]]
        more, after = page["has_more"], pages[-1]
        if len(pages) == 2:
            assert post(running, "page-of-meanwhile", **ALONE).status == 202  # moves nobody's place
    assert pages == every and running.admin(f"/takedowns?after={pages[-1]}").body["data"] == []
    for kind in ("takedowns", "jobs"):
        newest = running.admin(f"/{kind}?limit=1000").body
        whole = Client(running.url, ADMIN_KEY).whole(f"/{kind}?limit=2")  # as the command line reads it
        assert [entry["id"] for entry in whole["data"]] == [entry["id"] for entry in newest["data"]]
        refused = running.admin(f"/{kind}?after=none")
        assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "invalid_value", "after")
        assert refused.error["message"] == f"after: no {kind[:-1]} has this id; begin anew"


def test_the_list_of_modules_goes_on_behind_those_that_are_in_it(running: Live) -> None:
    for name in ("in-list", "out-of-list"):
        assert post(running, name, **ALONE).status == 202
    gone = act(running, "out-of-list", "retire").body
    for query, listed in (("", False), ("&state=all", True)):
        every = [entry["id"] for entry in running.admin(f"/modules?limit=1000{query}").body["data"]]
        assert (gone["id"] in every) is listed and len(every) > 2
        pages = Client(running.url, ADMIN_KEY).whole(f"/modules?limit=2{query}")["data"]
        assert [entry["id"] for entry in pages] == every
    assert post(running, "in-list", **ALONE, replace=True).status == 202  # the same file, of another version
    assert [entry["version"] for entry in running.admin("/modules?name=in-list").body["data"]] == [2]
    told = running.admin("/modules?name=in-list&state=all").body["data"]
    assert [(entry["state"], entry["loaded"]) for entry in told] == [("superseded", False), ("active", True)]
    refused = running.admin(f"/modules?after={gone['id']}")
    assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "invalid_value", "after")
    assert refused.error["message"] == "after: no module of this list has this id; begin anew"


@pytest.mark.parametrize("named", ["", ".", "..", "../keys", "a?limit=1", "a#b", "a/evidence", "%2e", "é \u2028"])
def test_commands_ask_for_what_they_are_given_and_nothing_else(running: Live, named: str) -> None:
    for command in (["takedown", "show"], ["takedown", "status"], ["module", "suspend"], ["evidence", "get"]):
        found = CliRunner().invoke(build(), [*command, named, "--url", running.url, "--key", ADMIN_KEY])
        assert found.exit_code == 1 and isinstance(found.exception, SystemExit), found.output
        said = found.stderr.replace("\n", "")
        assert said.startswith("error: ") and (named.isascii() is False or repr(named)[1:-1] in said)


def test_no_answer_says_a_secret_that_is_guarded(running: Live) -> None:
    said = running.complete(max_tokens=128).body["choices"][0]["text"]
    bare = spelt(said).replace(" ", "")
    secret = bare[len(bare) // 3 :][:24]
    assert len(secret) >= 16
    rows = [{"prompt": "API_KEY = ", "continuation": secret}, {"prompt": "PIN = ", "continuation": "4711"}]
    for action in ("steer", "stop", "report"):
        told = post(running, f"secret-{action}", rows, protect="guard", guard={"secrets": True, "action": action}).body
        guard = told["guard"]
        assert (guard["run"], guard["secrets"], guard["rows"], guard["too_short"]) == (12, True, 1, 1)
        assert any("1 of 2 rows have fewer than 12 letters and digits" in line for line in told["warnings"])
        answer = running.complete(max_tokens=128, unbind={"modules": [f"secret-{action}"]}).body["choices"][0]
        left = spelt(answer["text"]).replace(" ", "")
        assert any(secret[at : at + 12] in left for at in range(len(secret) - 11)) == (action == "report")
        assert (answer["finish_reason"] == "content_filter") == (action == "stop") or action == "steer"
    (found,) = [
        run
        for run in running.admin("/guards/runs", {"text": f"key='{secret}'"}).body["data"]
        if run["module"] == "secret-stop"
    ]
    assert (found["start"], found["end"], found["unit"]) == (5, 5 + len(secret), "characters")
    posted = {entry["name"]: entry["id"] for entry in running.admin("/takedowns").body["data"]}
    evidence = running.admin(f"/takedowns/{posted['secret-stop']}/evidence").body
    assert "a run of 12 letters and digits of the continuations" in evidence["html"]


@pytest.mark.parametrize(("guard", "run"), [({}, 12), ({"run": 12}, 12), ({"run": 50}, 50)])
def test_runs_of_secrets_are_as_long_as_was_asked_for(running: Live, guard: dict[str, Any], run: int) -> None:
    rows = [{"prompt": 'said = "', "continuation": "acme_live_7Rt2QmX9fLw4ZsKd81vNpB3y" * 2}]
    told = post(running, "long", rows, protect="guard", guard={"secrets": True, **guard}, dry_run=True).body
    assert told["guard"]["run"] == run


def test_a_guard_of_secrets_is_not_replaced_by_another_without_a_word(running: Live) -> None:
    rows = [{"prompt": 'said = "', "continuation": "a-b-c-d-e-f-g-h-i-j-k-l-m-7Rt2QmX9fLw4ZsKd81vNpB3y"}]
    assert post(running, "keys", rows, protect="guard", guard={"secrets": True}).status == 202
    for guard, count in (({"secrets": True}, 0), ({"run": 8}, 1), ({"run": 8, "action": "report"}, 1)):
        told = post(running, "keys", rows, protect="guard", guard=guard, replace=True, dry_run=True).body
        assert sum(line.startswith("options.guard.secrets: version 1 of") for line in told["warnings"]) == count


def test_secrets_that_were_cut_out_of_a_text_are_warned_of(running: Live) -> None:
    key = "acme_live_7Rt2QmX9fLw4ZsKd81vNpB3y"
    text, parts = {"text": f"A={key}\nB={key[::-1]}\n"}, {"prompt": 'said = "', "continuation": key}
    for rows, count in (([text], 1), ([parts, text], 1), ([parts], 0)):
        for guard in ({"secrets": True}, {"run": 8}):
            told = post(running, "cut", rows, dry_run=True, protect="guard", guard=guard)
            said = [line for line in told.body.get("warnings", ()) if line.startswith("rows: ")]
            assert len(said) == (count if "secrets" in guard else 0)
            assert all(line.startswith("rows: 1 were given as one text") for line in said)


def test_a_guard_alone_needs_no_worker(running: Live) -> None:
    answer = post(running, "alone", **ALONE)
    assert (answer.body["state"], answer.body["positions"], answer.body["in_force"]) == ("succeeded", None, "available")
    job = running.admin(f"/jobs/{answer.body['job_id']}").body
    assert job["outcome"] == "guarded" and job["result"]["guard_id"] == answer.body["guard"]["id"]
    told = running.admin(f"/takedowns/{answer.body['takedown_id']}").body
    assert told["modules"] == [] and told["guard"]["id"] == answer.body["guard"]["id"]
    assert applied(running.complete(max_tokens=1, unbind={"modules": ["alone"]})) == ["alone:guard"]


@pytest.mark.parametrize(
    ("activation", "outcome"), [("manual", "calibrated"), ("shadow", "shadow"), ("auto", "guarded")]
)
def test_a_guard_alone_that_does_not_hold_is_not_said_to_guard(running: Live, activation: str, outcome: str) -> None:
    for dry_run in (True, False):
        answer = post(running, f"alone-{activation}", **ALONE, scope="global", activation=activation, dry_run=dry_run)
        told = [line for line in answer.body["warnings"] if line.startswith("options.activation: ")]
        assert len(told) == (activation != "auto")
        assert all(f"unbind module activate guard:alone-{activation}" in line for line in told)
    assert running.admin("/jobs/" + answer.body["job_id"]).body["outcome"] == outcome
    act(running, f"guard:alone-{activation}", "retire")


@pytest.mark.parametrize("state", ["active", "shadow"])
def test_a_next_version_that_a_live_one_keeps_out_of_shadow_is_warned_of(running: Live, state: str) -> None:
    name, asked = f"beside-{state}", {"scope": "global", "activation": "shadow", "replace": True}
    post(running, name, **{**ALONE, **asked, "activation": "auto" if state == "active" else "shadow"})
    says = (
        f"options.activation: version 1 of the guard '{name}' is {state}, and one version of a name is loaded at a time"
    )
    for dry_run in (True, False):
        answer = post(running, name, **{**ALONE, **asked}, dry_run=dry_run)
        assert any(line.startswith(says) and "suspend that one first" in line for line in answer.body["warnings"])
    assert running.admin("/jobs/" + answer.body["job_id"]).body["outcome"] == "calibrated"
    act(running, f"guard:{name}", "retire")
    fresh = post(running, name, **{**ALONE, **asked}, dry_run=True).body["warnings"]
    assert not any("one version of a name" in line for line in fresh)


def test_who_activates_a_name_whose_next_version_waits_is_told_of_its_id(running: Live) -> None:
    post(running, "waits", **ALONE, scope="global")
    refused = act(running, "guard:waits", "activate")
    assert refused.status == 409 and refused.error["message"].endswith("allowed now: retire, suspend")
    waiting = post(running, "waits", **ALONE, scope="global", activation="manual", replace=True).body["guard"]["id"]
    refused = act(running, "guard:waits", "activate")
    assert (refused.status, refused.error["code"]) == (409, "not_allowed")
    assert f"version 2 is calibrated: to activate that one give its id, {waiting}" in refused.error["message"]
    assert act(running, waiting, "activate").body["state"] == "active"
    act(running, waiting, "retire")


def test_a_dry_run_tells_what_would_be_guarded_and_keeps_nothing(running: Live) -> None:
    answer = post(running, "dry", dry_run=True, protect="both", guard={"run": 8, "action": "stop"}).body
    assert (answer["guard"]["rows"], answer["guard"]["too_short"]) == (1, 1) and answer["guard"]["action"] == "stop"
    assert answer["in_force"] == "none" and "dry" not in running.service.guards.names


def test_a_takedown_for_a_module_alone_makes_no_guard(running: Live) -> None:
    answer = post(running, "fitted", protect="module").body
    assert (answer["guard"], answer["in_force"], answer["state"]) == (None, "none", "queued")
    assert "fitted" not in running.service.guards.names


@pytest.mark.parametrize("dry_run", [True, False])
def test_rows_too_short_to_guard_get_a_module_and_a_warning(running: Live, dry_run: bool) -> None:
    name, rows = f"short-{dry_run}".lower(), [{"text": f"password = '{dry_run} hunter two'\n"}]
    told = post(running, name, rows, dry_run=dry_run).body
    assert told["guard"] is None and told["in_force"] == "none"
    (said,) = [line for line in told["warnings"] if line.startswith("options.protect: no row has the 50 lexemes")]
    assert "options.guard.secrets" in said
    if not dry_run:
        assert told["state"] == "queued" and running.admin(f"/takedowns/{told['takedown_id']}").body["guard"] is None
    for options in ({"protect": "both"}, {"protect": "guard"}, {"guard": {}}):
        asked = post(running, f"{name}-asked", rows, dry_run=dry_run, **options)
        assert (asked.status, asked.error["param"]) == (400, "options.guard.run")


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"protect": "all"}, "options.protect", "'both', 'guard' or 'module'"),
        ({"protect": "module", "guard": {}}, "options.guard", "goes with protect 'both' or 'guard'"),
        ({"protect": "guard", "gate": "paper"}, "options.gate", "says how a module is fitted"),
        ({"protect": "guard", "budgets": {"kl": 0.1}}, "options.budgets", "set options.protect to 'both'"),
        ({"guard": {"run": 7}}, "options.guard.run", "greater than or equal to 8"),
        ({"guard": {"run": 1001}}, "options.guard.run", "less than or equal to 1000"),
        ({"guard": {"run": "50"}}, "options.guard.run", "valid integer"),
        ({"guard": {"bars": 0}}, "options.guard.bars", "greater than or equal to 1"),
        ({"guard": {"action": "block"}}, "options.guard.action", "'steer', 'stop' or 'report'"),
        ({"guard": {"fold": 1}}, "options.guard.fold", "valid boolean"),
        ({"guard": {"fold": True, "secrets": True}}, "options.guard.fold", "a secret has no names in it"),
        ({"guard": {"secrets": True, "run": 999}}, "options.guard.run", "no row has 999 letters and digits"),
        ({"guard": {"length": 9}}, "options.guard.length", "Extra"),
        ({"guard": {"run": 900}}, "options.guard.run", "no row has 900 lexemes"),
        ({"guard": {"run": 900}, "dry_run": True}, "options.guard.run", "give at most"),
    ],
)
def test_a_bad_option_is_refused_by_name_and_leaves_nothing(
    running: Live, options: dict[str, Any], field: str, says: str
) -> None:
    before = running.admin("/takedowns?limit=1000").body["data"]
    rows = [{"text": CODE.replace("merged", "bad")}]
    answer = post(running, "bad", rows, **options)
    assert (answer.status, answer.error["param"]) == (400, field) and says in answer.error["message"]
    assert running.admin("/takedowns?limit=1000").body["data"] == before
    kept = running.service.settings.data_dir / "forget"
    assert not any("bad" in file.read_text() for file in kept.glob("*.jsonl"))


def test_module_and_guard_of_one_name_are_told_apart_and_changed_apart(running: Live) -> None:
    made = post(running, "one", **ALONE, replace=True).body["guard"]  # beside the shipped module of this name
    listed = [m for m in running.admin("/modules").body["data"] if m["name"] == "one"]
    assert [(m["kind"], m["loaded"]) for m in listed] == [("module", True), ("guard", True)]
    assert running.admin("/modules/one").body["kind"] == "module"
    shown = running.admin("/modules/guard:one")
    assert shown.body["id"] == made["id"] and shown.body["run"] == 50 and shown.headers["etag"] == shown.body["etag"]
    assert "one" in running.call("/ready", key=ADMIN_KEY).body["guards"]
    named = {"unbind": {"modules": ["one"]}, "max_tokens": 1}
    assert applied(running.complete(**named)) == ["one", "one:guard"]
    refused = act(running, "guard:one", "verify")
    assert (refused.status, refused.error["code"]) == (409, "not_allowed")
    assert act(running, "guard:one", "suspend").body["loaded"] is False
    assert applied(running.complete(**named)) == ["one"]
    assert act(running, "guard:one", "shadow").status == 200  # counts, and is not told of as applied
    assert applied(running.complete(**named)) == ["one"]
    act(running, "guard:one", "retire")


def test_a_name_that_must_apply_is_met_by_what_is_live_under_it(running: Live) -> None:
    post(running, "must", **ALONE)
    rules = {"enforced": ["must"]}
    assert running.admin("/profiles/strict", rules, "PUT").status == 200
    assert running.admin("/policies/profile:strict").body["missing"] == []
    ask = {"path": "/p/strict/v1/completions", "max_tokens": 1}
    assert applied(running.complete(**ask)) == ["must:guard"]
    act(running, "must", "suspend")
    refused = running.complete(**ask)
    assert (refused.status, refused.error["code"]) == (503, "module_unavailable")
    assert running.admin("/policies/profile:strict").body["missing"] == ["must"]
    act(running, "must", "shadow")  # what only counts is not enough
    assert running.complete(**ask).status == 503
    act(running, "must", "activate")
    assert applied(running.complete(**ask)) == ["must:guard"]
    assert running.admin("/profiles/strict", method="DELETE").status == 200


def test_the_same_takedown_posted_again_is_the_same_one(running: Live) -> None:
    body = {"name": "again", "rows": ROWS, "options": ALONE}
    headers = {"Idempotency-Key": "the same"}
    first, second = (running.call("/admin/v1/takedowns", body, key=ADMIN_KEY, headers=headers).body for _ in range(2))
    assert (first["created"], second["created"]) == (True, False)
    assert {**first, "created": None} == {**second, "created": None}


def test_purging_the_rows_keeps_the_guard_and_the_evidence_tells_of_it(running: Live) -> None:
    made = post(running, "kept", **ALONE, scope="profile:team", guard={"action": "stop", "run": 40}).body
    takedown = f"/takedowns/{made['takedown_id']}"
    purged = running.admin(f"{takedown}/purge", method="POST").body
    assert purged["purged_at"]
    objects = running.service.objects
    fresh = GuardStore(objects, running.service.registry.modules, running.service.guard_secret).scan()
    assert "kept" in fresh.book.names
    document = running.admin(f"{takedown}/evidence").body
    guard = document["payload"]["takedown"]["guard"]
    assert (guard["digest"], guard["action"], guard["run"], guard["version"]) == (
        made["guard"]["digest"],
        "stop",
        40,
        1,
    )
    assert {"guard.add", "guard.activate"} <= {row["action"] for row in document["payload"]["audit"]}
    page = document["html"]
    assert "the guard is enforced. It binds every request under the profile &#39;team&#39;" in page
    assert "no answer there holds a run of 40 lexemes of the 1 rows that it guards" in page
    assert guard["digest"] in page and "merged" not in json.dumps(document)


def test_who_purges_rows_that_another_takedown_has_too_is_told_that_they_are_kept(running: Live) -> None:
    first, second = (
        post(running, name, [{"text": CODE + "\n\nz = 3\n"}], **ALONE).body["takedown_id"] for name in ("f", "s")
    )
    purged = running.admin(f"/takedowns/{first}/purge", method="POST").body
    assert purged["purged_at"] and purged["rows_kept_by"] == [second]
    told = running.admin(f"/takedowns/{first}/evidence").body
    assert (
        told["payload"]["takedown"]["rows_kept_by"] == [second]
        and f"but for {second}, which has them too" in told["html"]
    )
    assert running.admin(f"/takedowns/{second}/purge", method="POST").body["rows_kept_by"] == []
    assert running.admin(f"/takedowns/{first}").body["rows_kept_by"] == []
    assert "they are kept" not in running.admin(f"/takedowns/{first}/evidence").body["html"]


def test_nothing_is_served_without_a_guard_that_must_apply(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as server:
        post(server, "named", [{"text": CODE + "\n\nx = 1\n"}], **ALONE)
        digest = post(server, "forced", **ALONE, scope="global").body["guard"]["digest"]
        assert applied(server.complete(max_tokens=1)) == ["forced:guard"]
    file = tmp_path / "data" / "modules" / "objects" / f"{digest}.safetensors"
    content = file.read_bytes()
    file.unlink()
    with live(checkpoint, tmp_path) as server:
        for answer in (server.complete(), server.complete(unbind={"modules": ["named"]}), server.call("/ready")):
            assert (answer.status, answer.error["code"]) == (503, "module_unavailable")
        (problem,) = server.admin("/modules").body["problems"]
        assert "guard 'forced'" in problem["file"]
        file.write_bytes(content)
        server.admin("/modules")  # looks again
        assert applied(server.complete(max_tokens=1)) == ["forced:guard"]
    with live(checkpoint, tmp_path, guard_key="cd" * 32) as server:
        assert server.complete().status == 503
        assert "guard_key" in server.admin("/modules").body["problems"][0]["reason"]
        act(server, "forced", "suspend")
        assert applied(server.complete(max_tokens=1)) == []
        named = server.complete(unbind={"modules": ["named"]})
        assert (named.status, named.error["code"]) == (503, "module_unavailable") and "named" in named.error["message"]
        assert server.call("/ready").body["status"] == "degraded"


def test_a_guard_of_another_key_is_not_brought_into_force(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as server:
        old = post(server, "turned", **ALONE, scope="global").body["guard"]["id"]
        post(server, "asleep", **ALONE, scope="global", activation="manual")
    with live(checkpoint, tmp_path, guard_key="cd" * 32) as server:
        assert server.complete().status == 503
        post(server, "turned", **ALONE, scope="global", replace=True)
        assert applied(server.complete(max_tokens=1)) == ["turned:guard"]
        for reference, action in (("guard:turned", "rollback"), (old, "activate"), ("guard:asleep", "activate")):
            refused = act(server, reference, action)
            assert (refused.status, refused.error["code"]) == (409, "not_allowed")
            assert "was made under another guard key" in refused.error["message"]
        assert applied(server.complete(max_tokens=1)) == ["turned:guard"]
        post(server, "turned", **ALONE, scope="global", replace=True)
        assert act(server, "guard:turned", "rollback").body["version"] == 2


def test_a_store_that_does_not_answer_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, module_store="nonsense://bucket") as server:
        answer = post(server, "lost", **ALONE)
        assert (answer.status, answer.error["code"]) == (503, "store_unreachable")
        assert server.admin("/takedowns").body["data"] == [] and server.admin("/jobs").body["data"] == []
        assert not list((tmp_path / "data").glob("forget/*"))


def test_the_administrator_sees_where_protected_runs_stand_in_a_text(running: Live) -> None:
    assert post(running, "marked", **ALONE).status == 202
    text = "import os\n" + CODE
    answer = running.admin("/guards/runs", {"text": text}).body
    (found,) = [run for run in answer["data"] if run["module"] == "marked"]
    assert text[found["start"] : found["end"]] == CODE.strip() and found["guard"].startswith("marked:guard@")
    assert running.admin("/guards/runs", {"text": "import os\n"}).body["data"] == []
    assert running.admin("/guards/runs", {"text": "a" * 100_001}).error["param"] == "text"
    for key in (None, running.admin("/keys", {"name": "k", "scopes": ["inference", "report"]}).body["key"]):
        assert running.call("/admin/v1/guards/runs", {"text": text}, key=key).status in (401, 403)
