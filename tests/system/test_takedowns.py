"""A takedown from POST to the next request, by real processes on a model that has really memorised."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from server.evidence.signing import verify
from server.registry.objects import MARK
from tests.support.folders import files_in
from tests.support.memorising import forget_rows, retain_rows, write_rows
from tests.system.conftest import ServerProcess, serving
from unbind_core.module import UnbindModule

ROWS = forget_rows()
SHORT = {"guard": {"run": 20}, "effort": 0.2}  # as these rows are; a quick look does for so small a model
UNKNOWN = [
    {"prompt": f"class Unseen{i}:\n", "continuation": f"    zz_{i * 37} = 'never trained' + qq({i})\n" * 3}
    for i in range(4)
]


@pytest.fixture(scope="module")
def server(memorised: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server and its worker, with a short lease."""
    folder = tmp_path_factory.mktemp("takedowns")
    retain = write_rows(folder / "retain.jsonl", retain_rows())
    test = write_rows(folder / "test.jsonl", retain_rows(6))
    with serving(memorised, folder, retain=retain, retain_test=test, lease_seconds=3) as running:
        yield running


def _submit(server: ServerProcess, name: str, rows: Any = ROWS, **fields: Any) -> str:
    options = SHORT | fields.pop("options", {})
    status, answer = server.admin("/takedowns", {"name": name, "rows": rows, "options": options, **fields})
    assert status == 202, answer
    return str(answer["job_id"])


def _wait_until_running(server: ServerProcess, job_id: str, stage: str = "check") -> None:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        job = server.admin(f"/jobs/{job_id}")[1]
        assert job["state"] in ("queued", "running"), job
        if job["state"] == "running" and job["stage"] == stage:
            return
        time.sleep(0.05)
    raise AssertionError(job)


def test_a_posted_takedown_becomes_a_module_that_the_next_request_can_use(server: ServerProcess) -> None:
    prompt, protected = ROWS[0]["prompt"], ROWS[0]["continuation"]
    assert server.complete(prompt, max_tokens=110).startswith(protected)
    body = {"name": "set-t", "rows": ROWS, "notice": {"claimant": "a test"}, "options": SHORT}
    status, first = server.admin("/takedowns", body, {"Idempotency-Key": "once"})
    assert status == 202 and first["created"]
    assert server.admin("/takedowns", body, {"Idempotency-Key": "once"})[1]["job_id"] == first["job_id"]
    assert server.admin("/takedowns", {**body, "name": "other"}, {"Idempotency-Key": "once"})[0] == 409
    assert server.admin("/takedowns", {**body, "notice": {}})[1]["error"]["code"] == "name_taken"
    seen = []
    while (job := server.admin(f"/jobs/{first['job_id']}")[1])["state"] in ("queued", "running"):
        seen.append((job["stage"], job["progress"]))
        time.sleep(0.1)
    assert (job["state"], job["outcome"], job["progress"]) == ("succeeded", "active", 1.0), job
    assert {"check", "fit", "verify"} <= {stage for stage, _ in seen} and seen == sorted(seen, key=lambda s: s[1])
    assert set(job["timings"]) == {"check", "fit", "verify", "joint", "publish"}
    table = job["result"]["verify"]
    assert table["before"]["all"].items() <= job["result"]["check"].items()  # asked once
    assert table["after"]["all"]["f_bleu"] < 0.5 * table["before"]["all"]["f_bleu"]
    # the very next request
    status, answer, headers = server.call(
        "/v1/completions", {"prompt": prompt, "max_tokens": 110, "temperature": 0, "unbind": {"modules": ["set-t"]}}
    )
    applied = [label.split("@")[0] for label in headers["x-unbind-modules"].split(",")]
    assert status == 200 and applied == ["set-t", "set-t:guard"]
    assert protected not in answer["choices"][0]["text"]
    assert server.complete(prompt, max_tokens=110).startswith(protected)  # nobody asked, nothing changed
    module, guard = (m for m in server.admin("/modules")[1]["data"] if m["name"] == "set-t")
    assert (guard["kind"], guard["run"], guard["takedown_id"]) == ("guard", 20, first["takedown_id"])
    assert module["job_id"] == first["job_id"] and module["measured"]["after"]["all"]["rows"] == len(ROWS)
    assert server.admin("/takedowns", {**body, "notice": {}})[0] == 409
    for path in (server.data_dir / "forget").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not any(protected[:40] in line for line in server.log)


def test_a_second_module_is_measured_with_the_first_verified_again_and_told_of(server: ServerProcess) -> None:
    server.admin("/profiles/editor", {}, method="PUT")
    # what the two cost together is no more than either may
    options = {"activation": "manual", "scope": "profile:editor", "budgets": {"kl": 1, "nll": 1}}
    job = server.wait_for_job(_submit(server, "second", ROWS[:5], options=options, notice={"claimant": "a test"}))
    assert (job["state"], job["outcome"]) == ("succeeded", "calibrated"), job
    module = server.admin("/modules/second")[1]
    assert (module["state"], module["loaded"], module["scope"]) == ("calibrated", False, "profile:editor")
    (file,) = (path for path in server.data_dir.parent.rglob(f"*{module['digest']}*") if path.is_file())
    assert UnbindModule.load(file).settings["beside"] == 1  # it was fitted as one of two
    status, answer = server.admin("/modules/second/activate", None, {"If-Match": module["etag"]}, "POST")
    assert status == 202, answer
    joint = server.wait_for_job(answer["job_id"])
    measured = joint["result"]["joint"]
    assert joint["state"] == "succeeded" and measured["modules"] == ["second", "set-t"], joint
    assert measured["within"] and joint["outcome"] == "active"
    assert server.admin("/modules/second")[1]["loaded"]
    again = server.wait_for_job(server.admin("/modules/second/verify", method="POST")[1]["job_id"])
    assert again["outcome"] == "verified" and again["result"]["verify"]["after"]["all"]["rows"] == 5
    document = server.admin(f"/takedowns/{job['takedown_id']}/evidence")[1]
    payload = document["payload"]
    assert verify(document) and payload["report"]["levels"] and len(payload["exhibits"]["samples"]) == 3
    assert sum(payload["exhibits"]["histograms"]["counts"]["forget"]) > 20 and document["html"].count("<svg") >= 2
    assert server.admin(f"/takedowns/{job['takedown_id']}/purge", method="POST")[0] == 200
    payload = server.admin(f"/takedowns/{job['takedown_id']}/evidence")[1]["payload"]
    assert payload["exhibits"] is None and payload["takedown"]["forget_digest"]
    assert server.admin("/modules/second/verify", method="POST")[1]["error"]["code"] == "rows_not_kept"


def test_a_replaced_module_is_superseded_and_comes_back_by_rollback(server: ServerProcess) -> None:
    first = server.admin("/modules/set-t")[1]
    body: dict[str, Any] = {"options": {"replace": True, "seed": 1, "override": True}}
    job = server.wait_for_job(_submit(server, "set-t", **body))
    assert job["outcome"] == "active", job
    second = server.admin("/modules/set-t")[1]
    assert (first["version"], second["version"], second["loaded"]) == (1, 2, True)
    assert server.admin(f"/modules/{first['id']}")[1]["state"] == "superseded"
    status, back = server.admin("/modules/set-t/rollback", None, {"If-Match": second["etag"]}, "POST")
    assert status == 200 and back["id"] == first["id"] and back["loaded"]
    answer = server.call("/v1/completions", {"prompt": "a", "max_tokens": 1, "unbind": {"modules": ["set-t"]}})
    guard = server.admin("/modules/guard:set-t")[1]
    assert (guard["version"], guard["state"]) == (2, "active")  # which goes back by itself alone
    labels = [f"set-t@{first['digest'][:12]}", f"set-t:guard@{guard['digest'][:12]}"]
    assert answer[2]["x-unbind-modules"] == ",".join(labels)


def test_rows_that_were_never_memorised_end_as_nothing_to_remove(server: ServerProcess) -> None:
    job = server.wait_for_job(_submit(server, "unknown", UNKNOWN))
    assert (job["state"], job["outcome"]) == ("succeeded", "nothing_to_remove")
    assert job["result"]["check"]["extracted"] == 0
    assert [m["kind"] for m in server.admin("/modules")[1]["data"] if m["name"] == "unknown"] == ["guard"]


def test_a_job_is_cancelled_while_it_runs(server: ServerProcess) -> None:
    job_id = _submit(server, "cancelled")
    _wait_until_running(server, job_id, "fit")
    assert server.admin(f"/jobs/{job_id}/cancel", method="POST")[0] == 200
    job = server.wait_for_job(job_id, 20)
    assert job["state"] == "cancelled"
    assert server.admin("/jobs/none/cancel", method="POST")[0] == 404


def test_a_killed_worker_s_job_is_taken_over_and_published_once(server: ServerProcess) -> None:
    # what it costs together with those in force, which are of the same rows, is another test's
    job_id = _submit(server, "survivor", options={"override": True})
    _wait_until_running(server, job_id, "fit")
    (pid,) = server.worker_pids()
    os.kill(pid, signal.SIGKILL)
    assert server.complete("def alpha0(", max_tokens=4) is not None  # serving goes on
    job = server.wait_for_job(job_id)
    assert (job["state"], job["outcome"], job["attempt"]) == ("succeeded", "active", 2), job
    everything = server.admin("/modules?state=all")[1]["data"]
    records = [m for m in everything if m["name"] == "survivor" and m["kind"] == "module"]
    assert [record["job_id"] for record in records] == [job_id]
    assert [
        path.name
        for path in files_in(server.data_dir / "modules")
        if path.suffix != ".safetensors" and path.name != MARK
    ] == []
    assert server.worker_pids() != [pid]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"name": "x", "rows": []}, "rows", "at least one"),
        ({"name": "x", "rows": ROWS[:2], "options": {"gate": "paper"}}, "rows", "needs 3, 'auto' needs one"),
        ({"name": "x", "rows": ROWS[:2], "options": {"gate": "paper-strict"}}, "rows", "'paper-strict' needs 3"),
        ({"name": "x", "rows": ROWS, "options": {"gate": "none"}}, "options.gate", "auto"),
        (
            {"name": "x", "rows": ROWS, "options": {"gate": "paper-strict", "budgets": {"kl": 0.1}}},
            "options.budgets",
            "the paper's own",
        ),
        (
            {"name": "x", "rows": ROWS, "options": {"scope": "profile:none"}},
            "options.scope",
            "make the key or the profile",
        ),
        ({"name": "x", "rows": [*ROWS[:3], {"prompt": "a"}]}, "rows", "rows.3: field 'continuation'"),
        ({"name": "x", "rows": [*ROWS[:3], {"text": 5}]}, "rows", "rows.3: field 'text'"),
        ({"name": "../x", "rows": ROWS}, "name", "name"),
        ({"name": "x", "rows": "all"}, "rows", "list"),
        ({"name": "x", "rows": ROWS, "option": {}}, "option", "Extra"),
        ({"name": "x", "rows": ROWS, "options": {"layers": [99]}}, "options.layers", "layers 0 to 2"),
        ({"rows": ROWS}, "name", "required"),
    ],
)
def test_a_bad_takedown_is_refused_by_the_name_of_its_field(
    server: ServerProcess, body: Any, param: str, says: str
) -> None:
    status, answer = server.admin("/takedowns", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param and says in answer["error"]["message"]


def test_chat_goes_through_the_tokenizer_s_template(server: ServerProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": ROWS[1]["prompt"].rstrip("\n")}]
    expected = server.complete(ROWS[1]["prompt"], max_tokens=30)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 30}
        whole = client.chat.completions.create(**fields)
        assert whole.choices[0].message.content == expected
        with client.chat.completions.create(**fields, stream=True) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


@pytest.mark.slow
def test_a_worker_ends_when_its_server_is_killed(memorised: Path, tmp_path: Path) -> None:
    with serving(memorised, tmp_path) as server:
        deadline = time.monotonic() + 30
        while not server.worker_pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        (pid,) = server.worker_pids()
        server.process.kill()
        server.process.wait()
        while time.monotonic() < deadline + 60:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return  # it has ended; whoever adopted it has not looked yet
            time.sleep(0.2)
    raise AssertionError("the worker lives on")


@pytest.mark.slow
def test_a_job_survives_its_server_and_worker_being_killed(memorised: Path, tmp_path: Path) -> None:
    retain = write_rows(tmp_path / "retain.jsonl", retain_rows())
    settings: dict[str, Any] = {"retain": retain, "retain_test_limit": 0, "lease_seconds": 3}
    with serving(memorised, tmp_path, **settings) as server:
        job_id = _submit(server, "survivor")
        _wait_until_running(server, job_id, "fit")
        done = set(server.admin(f"/jobs/{job_id}")[1]["timings"])
        server.process.kill()
        server.process.wait()
    with serving(memorised, tmp_path, **settings) as server:
        job = server.wait_for_job(job_id)
        assert (job["state"], job["outcome"]) == ("succeeded", "active") and done <= set(job["timings"])
        records = server.admin("/modules?state=all")[1]["data"]
        stand = [(record["name"], record["kind"], record["loaded"]) for record in records]
        assert stand == [("survivor", "module", True), ("survivor", "guard", True)]
        assert server.admin("/audit/verify")[1]["whole"]
