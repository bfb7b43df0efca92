"""The admin API and its commands over HTTP: uploads, lifecycle on revisions, events, audit, evidence; with the database held up."""

from __future__ import annotations

import io
import json
import sqlite3
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from server.cli import build
from tests.server.conftest import build_module
from tests.support.disks import Disk
from tests.support.folders import unfinished_in
from tests.system.conftest import ADMIN_KEY, ServerProcess, serving
from unbind_core.architecture import load_model

ROWS = [{"prompt": f"def f{i}():\n", "continuation": f"    return {i} + secret_{i}\n"} for i in range(5)]
SHORT = {"guard": {"run": 8}}  # as these rows are


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server without a worker, with three shipped modules."""
    folder = tmp_path_factory.mktemp("admin")
    identity = load_model(checkpoint).identity
    (folder / "modules").mkdir()
    for number, name in enumerate(("one", "two", "three")):
        build_module(identity, name, layer=number, seed=number).save(folder / "modules" / f"{name}.safetensors")
    with serving(checkpoint, folder, worker=False, model_name="tiny", max_body_bytes=1_000_000) as running:
        yield running


def upload(server: ServerProcess, file: bytes, **fields: Any) -> Any:
    """POST /takedowns as a form."""
    parts = [f'--b\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n'.encode() for n, v in fields.items()]
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="rows"\r\n\r\n'
    body = b"".join([*parts, head, file, b"\r\n--b--\r\n"])
    return server.admin("/takedowns", body, {"Content-Type": "multipart/form-data; boundary=b"})


def act(server: ServerProcess, name: str, action: str, etag: str | None) -> Any:
    return server.admin(f"/modules/{name}/{action}", None, {"If-Match": etag} if etag else {}, "POST")


def test_an_upload_becomes_a_job_and_its_rows_stay_private(server: ServerProcess) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(4):
            archive.writestr(f"src/f{number}.py", f"def f{number}():\n    a = {number}\n    return a\n" * 3)
    options = json.dumps({"activation": "manual", "dry_run": True, **SHORT})
    status, estimate = upload(server, out.getvalue(), name="uploaded", include="*.py", options=options)
    assert status == 200 and estimate["rows"] == 4 and estimate["positions"] > 20 and estimate["seconds"] is None
    assert not (server.data_dir / "forget").exists()
    notice = json.dumps({"claimant": "somebody", "reference": "R-1"})
    options = json.dumps(SHORT)
    status, made = upload(server, out.getvalue(), name="uploaded", include="*.py", notice=notice, options=options)
    assert status == 202 and made["rows"] == 4, made
    takedown = server.admin(f"/takedowns/{made['takedown_id']}")[1]
    assert takedown["notice"] == {"claimant": "somebody", "reference": "R-1"} and takedown["jobs"] == [made["job_id"]]
    assert "return a" not in json.dumps(takedown)
    assert server.admin(f"/takedowns/{made['takedown_id']}/purge", method="POST")[0] == 409
    server.admin(f"/jobs/{made['job_id']}/cancel", method="POST")
    assert server.admin(f"/takedowns/{made['takedown_id']}/purge", method="POST")[1]["purged_at"] is not None
    assert list((server.data_dir / "forget").iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "file", "says"),
    [
        ({"name": "x"}, b"\x00\x01", "binary"),
        ({"name": "x"}, b"", "empty"),
        ({"name": "../x"}, b"{}", "name"),
        ({}, b"{}", "name"),
        ({"name": "x", "options": "{"}, b"{}", "options is not valid JSON"),
        ({"name": "x", "options": '{"activation": "now"}'}, b"{}", "activation"),
        ({"name": "x", "options": '{"scope": "everybody"}'}, b"{}", "scope"),
        ({"name": "x", "colour": "red"}, b"{}", "colour: unknown part"),
    ],
)
def test_a_bad_upload_is_refused_by_name(server: ServerProcess, fields: Any, file: bytes, says: str) -> None:
    status, answer = upload(server, file, **fields)
    assert status == 400 and says in answer["error"]["message"], answer


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"expires_at": "2001-01-01T00:00:00Z"}, "options.expires_at: lies before"),
        ({"effective_at": "2101-01-01T00:00:00Z", "activation": "manual"}, "options.effective_at: goes with"),
        ({"effective_at": "2101-01-01T00:00:00"}, "options.effective_at"),
        ({"budgets": {"kl": 0}}, "options.budgets.kl"),
    ],
)
def test_options_that_make_no_sense_are_refused(server: ServerProcess, options: Any, says: str) -> None:
    status, answer = server.admin("/takedowns", {"name": "x", "rows": ROWS, "options": options})
    assert status == 400 and says in answer["error"]["message"]
    (server.data_dir / "forget").mkdir(exist_ok=True)
    assert list((server.data_dir / "forget").iterdir()) == []


def test_what_is_too_large_or_no_text_has_an_answer_too(server: ServerProcess) -> None:
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=10)) as connection:
        connection.putrequest("POST", "/admin/v1/takedowns")
        connection.putheader("Authorization", f"Bearer {ADMIN_KEY}")
        connection.putheader("Content-Length", str(2**30))
        connection.endheaders()
        assert connection.getresponse().status == 413  # and not one byte of it was read
    long = {"prompt": "word " * 3000, "continuation": "x"}
    status, answer = server.admin("/takedowns", {"name": "x", "rows": [*ROWS, long]})
    assert status == 400 and "rows.5: its prompt has" in answer["error"]["message"]
    assert server.admin("/takedowns", b"[[[", {})[1]["error"]["code"] == "invalid_json"
    assert server.admin("/takedowns", b"[" * 100_000)[0] == 400


def test_a_module_s_life_over_http(server: ServerProcess) -> None:
    module = server.admin("/modules/one")[1]
    assert (module["state"], module["loaded"], module["origin"]) == ("active", True, "shipped")
    assert act(server, "one", "suspend", None)[0] == 428
    assert act(server, "one", "suspend", '"other-1"')[0] == 412
    status, suspended = act(server, "one", "suspend", module["etag"])
    assert status == 200 and suspended["state"] == "suspended" and not suspended["loaded"]
    assert "one" not in [m["name"] for m in server.admin("/modules")[1]["data"]]
    assert "one" in [m["name"] for m in server.admin("/modules?state=all")[1]["data"]]
    refused = server.call("/v1/completions", {"prompt": "a", "max_tokens": 1, "unbind": {"modules": ["one"]}})
    assert refused[0] == 400  # what is suspended cannot be named, and is not quietly left out
    status, answer = act(server, "one", "suspend", "*")
    assert status == 409 and "allowed now: activate, retire, shadow" in answer["error"]["message"]
    assert act(server, "one", "fly", "*")[0] == 400
    assert act(server, "nobody", "retire", "*")[0] == 404
    assert act(server, "one", "rollback", "*")[0] == 409
    assert act(server, "one", "activate", None)[0] == 428
    # files promise nothing together, so that no cost has to be measured first; beside takedowns: test_overlaps.py
    status, active = act(server, "one", "activate", suspended["etag"])
    assert (status, active["state"], active["loaded"]) == (200, "active", True)
    assert server.admin("/modules/one/verify", method="POST")[1]["error"]["code"] == "rows_not_kept"
    actions = [row["action"] for row in server.admin("/audit?limit=1000")[1]["data"] if row["subject"] == module["id"]]
    assert actions == ["module.add", "module.activate", "module.suspend", "module.activate"]
    assert server.admin("/audit/verify")[1] == {"object": "audit.verification", "whole": True, "problems": []}


def test_of_racing_operators_one_wins(server: ServerProcess) -> None:
    etag = server.admin("/modules/two")[1]["etag"]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: act(server, "two", "suspend", etag)[0], range(6)))
    assert sorted(answers) == [200, 412, 412, 412, 412, 412]
    act(server, "two", "activate?override=true", "*")


def test_events_tell_of_a_job_until_its_end(server: ServerProcess) -> None:
    made = server.admin("/takedowns", {"name": "followed", "rows": ROWS, "options": SHORT})[1]
    events: list[str] = []

    def follow() -> None:
        request = Request(
            f"{server.url}/admin/v1/jobs/{made['job_id']}/events", headers={"Authorization": f"Bearer {ADMIN_KEY}"}
        )
        with urlopen(request, timeout=30) as stream:
            events.extend(line.decode().strip() for line in stream if line.strip())

    thread = threading.Thread(target=follow)
    thread.start()
    time.sleep(1)
    server.admin(f"/jobs/{made['job_id']}/cancel", method="POST")
    thread.join(10)
    assert [line for line in events if line.startswith("event")] == ["event: progress", "event: end"]
    assert json.loads(events[-1].removeprefix("data: "))["state"] == "cancelled"
    assert server.admin("/jobs/none/events")[0] == 404
    evidence = server.admin(f"/takedowns/{made['takedown_id']}/evidence")[1]
    assert evidence["payload"]["jobs"][0]["state"] == "cancelled" and evidence["payload"]["report"] is None


def test_the_commands_mirror_it(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    own = {"text": "print('rows that no other takedown of this server has')\n"}  # else they are kept for that one
    file.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, own]))

    def run(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(build(), [*arguments, "--url", server.url, "--key", ADMIN_KEY, "--json"])
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if code == 0 else done.stderr

    asked = ["takedown", "submit", str(file), "--name", "by-hand", "--guard-run", "8", "--guard-action", "stop"]
    made = run(*asked, "--claimant", "somebody")
    assert (made["guard"]["action"], made["guard"]["run"], made["guard"]["state"]) == ("stop", 8, "active")
    assert run("takedown", "status", made["job_id"])["state"] == "queued"
    assert made["job_id"] in [job["id"] for job in run("takedown", "status")]
    assert run("takedown", "list")[0]["id"] == made["takedown_id"]
    told = CliRunner().invoke(build(), ["takedown", "list", "--url", server.url, "--key", ADMIN_KEY]).stdout
    assert f"{made['takedown_id']}  by-hand  " in told and made["job_id"] in told
    assert "is making module" in run("takedown", "submit", str(file), "--name", "by-hand", code=1)
    assert run("takedown", "cancel", made["job_id"])["state"] == "cancelled"
    assert run("takedown", "retry", made["job_id"])["state"] == "queued"
    run("takedown", "cancel", made["job_id"])
    watched = ["takedown", "retry", made["job_id"], "--watch", "--json", "--url", server.url, "--key", ADMIN_KEY]
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(CliRunner().invoke, build(), watched)
        while server.admin(f"/jobs/{made['job_id']}")[1]["state"] != "queued":
            assert not watching.done(), watching.result().output
        assert server.admin(f"/jobs/{made['job_id']}/cancel", {})[0] == 200
        told = watching.result()
    assert told.exit_code == 1 and json.loads(told.stdout)["state"] == "cancelled"
    document = tmp_path / "evidence.json"
    signed = run("evidence", "get", made["takedown_id"], "--out", str(document), "--html", str(tmp_path / "e.html"))
    assert (tmp_path / "e.html").read_text().startswith("<!doctype html>")
    checked = CliRunner().invoke(build(), ["evidence", "verify", str(document), "--signed-by", signed["signed_by"]])
    assert checked.exit_code == 0
    again = run(*asked, "--protect", "guard", "--replace")["takedown_id"]
    for takedown, says in (
        (made["takedown_id"], f"kept on for {again}, which has them too: purge that as well"),
        (again, "deleted"),
    ):
        told = CliRunner().invoke(build(), ["takedown", "purge", takedown, "--url", server.url, "--key", ADMIN_KEY])
        assert f"the rows of {takedown} are {says}; their digest is" in told.stdout
    assert run("takedown", "purge", made["takedown_id"])["rows_kept_by"] == []
    assert run("module", "suspend", "three")["state"] == "suspended"
    every = run("module", "list", "--all")["data"]
    assert {module["name"] for module in every if module["kind"] == "module"} == {"one", "two", "three"}
    assert "by-hand" in {module["name"] for module in every if module["kind"] == "guard"}
    assert run("module", "suspend", "guard:by-hand")["state"] == "suspended"
    assert (
        run("module", "activate", "three", "--override")["state"] == "active"
        and run("module", "show", "three")["loaded"]
    )
    copy = str(tmp_path / "copy.sqlite")
    for command in (["db", "check"], ["db", "backup", "--out", copy], ["audit", "verify"], ["audit", "list"]):
        done = CliRunner().invoke(build(), [*command, "--data-dir", str(server.data_dir), "--json"])
        assert done.exit_code == 0, done.output
    plain = CliRunner().invoke(build(), ["takedown", "status", "--url", "http://127.0.0.1:9", "--key", "x"])
    assert plain.exit_code == 1 and "does not answer" in plain.output


def test_a_full_disk_refuses_changes_with_the_reason_and_goes_on_serving(
    checkpoint: Path, tmp_path: Path, disk: Disk
) -> None:
    with serving(checkpoint, tmp_path, data_dir=disk.folder / "data", worker=False) as server:
        before = server.complete("def add(", max_tokens=4)
        disk.fill([server.process.pid])
        for _ in range(2):
            status, answer = server.admin("/takedowns", {"name": "m", "rows": ROWS, "options": SHORT})
            assert (status, answer["error"]["code"]) == (507, "disk_full") and "make room" in answer["error"]["message"]
            status, answer = server.admin("/profiles/editor", {}, method="PUT")
            assert (status, answer["error"]["code"]) == ((507, "disk_full") if disk.own else (503, "not_writable"))
        assert server.complete("def add(", max_tokens=4) == before
        assert server.admin("/takedowns")[1]["data"] == [] and not unfinished_in(disk.folder)
        disk.free([server.process.pid])
        assert server.admin("/takedowns", {"name": "m", "rows": ROWS, "options": SHORT})[0] == 202
        assert len(server.admin("/takedowns")[1]["data"]) == 1


def test_a_module_is_suspended_on_a_full_disk_and_stays_so_once_there_is_room(
    checkpoint: Path, tmp_path: Path, disk: Disk
) -> None:
    named: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "unbind": {"modules": ["one"]}}
    (tmp_path / "modules").mkdir()
    for name in ("one", "two"):
        build_module(load_model(checkpoint).identity, name).save(tmp_path / "modules" / f"{name}.safetensors")
    with serving(checkpoint, tmp_path, data_dir=disk.folder / "data", worker=False, enforced="two") as server:
        one, two = server.admin("/modules/one")[1], server.admin("/modules/two")[1]
        assert server.call("/v1/completions", named)[0] == 200
        disk.fill([server.process.pid])
        assert act(server, "two", "retire", two["etag"])[0] == (
            507 if disk.own else 503
        )  # what is no emergency is refused
        assert act(server, "one", "suspend", None)[0] == 428
        assert act(server, "one", "suspend", '"other"')[0] == 412
        status, answer = act(server, "one", "suspend", one["etag"])
        assert (status, answer["loaded"]) == (202, False) and "this server process only" in answer["withheld"], answer
        assert "withheld" in server.admin("/modules/one")[1]
        status, refused, _ = server.call("/v1/completions", named)
        assert (status, refused["error"]["code"]) == (400, "unknown_module")
        assert server.call("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert act(server, "two", "suspend", two["etag"])[0] == 202
        assert (
            server.call("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 503
        )  # a policy names it: never without
        disk.free([server.process.pid])
        deadline = time.monotonic() + 30
        while server.admin("/modules/one")[1]["state"] != "suspended":
            assert time.monotonic() < deadline, server.log[-20:]
            time.sleep(0.2)
        written = [row for row in server.admin("/audit")[1]["data"] if row["action"] == "module.suspend"]
        assert (
            written[0]["subject"] == one["id"] and written[0]["actor"] == "admin" and written[0]["detail"]["asked_at"]
        )
        assert "withheld" not in server.admin("/modules/one")[1] and server.admin("/audit/verify")[1]["whole"]


@pytest.mark.slow
def test_a_database_held_up_for_ten_seconds_leaves_serving_alone(server: ServerProcess) -> None:
    with closing(sqlite3.connect(server.data_dir / "unbind.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(1) as pool:
            posting = pool.submit(server.admin, "/takedowns", {"name": "late", "rows": ROWS, "options": SHORT})
            slowest = 0.0
            for _ in range(20):
                began = time.monotonic()
                server.complete("def add(", max_tokens=4, unbind={"modules": ["one"]})
                slowest = max(slowest, time.monotonic() - began)
                time.sleep(0.5)
            other.execute("ROLLBACK")
            status, answer = posting.result(30)
    assert slowest < 3 and (status == 202 or answer["error"]["code"] == "registry_unreachable")
    status, made = server.admin("/takedowns", {"name": "later", "rows": ROWS, "options": SHORT})
    assert status == 202, made
