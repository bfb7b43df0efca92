"""What a server tells of itself, and to whom; what it says when its data, its database or a module is not there."""

from __future__ import annotations

import http.client
import logging
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.registry.access import Access
from server.registry.audit import Actor
from server.registry.objects import ObjectStore
from server.registry.records import NewModule
from server.registry.registry import open_registry
from server.registry.tables import Origin
from server.telemetry.figures import Figures
from server.telemetry.metrics import Telemetry
from tests.server.api.admin.test_modules import act, adopt, applied
from tests.support.live import ADMIN_KEY, Live, live, until
from tests.support.modules import build_module
from unbind_core.errors import UnbindError

WATCHED = ("/metrics", "/console/state.json", "/openapi.json")


def key_of(server: Live, *scopes: str) -> str:
    return str(server.admin("/keys", {"name": "k", "scopes": list(scopes)}).body["key"])


def evaluations(text: bytes) -> float:
    """Positions at which any gate was read, of an exposition."""
    return total(text, "unbind_gate_evaluations_total")


def total(text: bytes, name: str) -> float:
    """All samples of a name together."""
    lines = (line for line in text.decode().splitlines() if line.startswith(name))
    return sum(float(line.split()[-1]) for line in lines)


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a key, whose gates are read once an hour for those who may not have reports."""
    folder = tmp_path_factory.mktemp("watched")
    with live(checkpoint, folder, metrics_interval=3600.0, metrics_port=0) as running:
        key_of(running, "inference")
        yield running


def test_without_a_key_anybody_on_this_machine_may_look(server: Live) -> None:
    assert {server.call(path).status for path in WATCHED} == {200}
    ready = server.call("/ready").body
    assert (ready["status"], ready["modules"], ready["missing"]) == ("ready", ["one", "two"], [])


def test_routers_whose_worker_has_an_address_with_a_profile_find_its_health(server: Live) -> None:
    for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json"):
        assert server.call(f"/p/safe{path}").status == 200, path


def test_once_a_key_exists_only_keys_see_modules(guarded: Live) -> None:
    for path in WATCHED:
        refused = guarded.call(path)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key"), path
        assert guarded.call(path, key="ubk_wrong").status == 401 and guarded.call(path, key=ADMIN_KEY).status == 200
    assert guarded.call("/ready").body == {"status": "ready"} == guarded.call("/ready", key="ubk_wrong").body
    assert guarded.call("/ready", key=key_of(guarded, "metrics")).body["modules"] == ["one", "two"]


@pytest.mark.parametrize(
    ("scope", "statuses"), [("metrics", [200, 403, 200]), ("inference", [403, 200, 200]), ("admin", [200, 200, 200])]
)
def test_each_scope_sees_what_it_is_for(guarded: Live, scope: str, statuses: list[int]) -> None:
    key = key_of(guarded, scope)
    assert [guarded.call(path, key=key).status for path in WATCHED] == statuses


def test_beyond_loopback_looking_needs_a_key_though_inference_does_not(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, host="0.0.0.0", insecure=True) as server:
        assert server.complete().status == 200
        assert {server.call(path).status for path in WATCHED} == {401}
        assert server.call("/ready").body == {"status": "ready"}


def test_one_prompt_cannot_be_read_off_the_counts_without_the_right_to_reports(guarded: Live) -> None:
    scraper, reporter = key_of(guarded, "metrics"), key_of(guarded, "metrics", "report")
    port = guarded.service.telemetry.port

    def on_its_port() -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read()
        connection.close()
        return text

    def seen() -> list[float]:
        return [evaluations(guarded.call("/metrics", key=key).raw) for key in (scraper, reporter)]

    before = seen()
    assert guarded.complete(key=ADMIN_KEY, unbind={"modules": ["one"]}).status == 200
    shown, now = guarded.call("/metrics", key=scraper).raw, guarded.call("/metrics", key=reporter).raw
    for name in ("unbind_gate_score_bucket", "unbind_module_open_requests_total", "unbind_gate_activations_total"):
        assert total(shown, name) == total(on_its_port(), name) == 0 < total(now, name), name
    delayed, at_once = seen()
    assert delayed == before[0] == evaluations(on_its_port()) and at_once > before[1]
    assert b"unbind_slots 4.0" in on_its_port() and b"unbind_requests_total" in on_its_port()


def test_the_counts_come_to_everybody_in_time(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, metrics_interval=0.05) as server:
        scraper = key_of(server, "metrics")
        server.complete(key=ADMIN_KEY, unbind={"modules": ["one"]})
        until(lambda: evaluations(server.call("/metrics", key=scraper).raw) > 0)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    telemetry = Telemetry(lambda: Figures(0, 0, 0, 0), "embedded")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnbindError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}"):
            telemetry.listen("127.0.0.1", port)


def test_a_suspended_module_is_not_replaced_by_a_dropped_file(checkpoint: Path, tmp_path: Path) -> None:
    profiles = {"safe": {"modules": ["held"]}}
    with live(checkpoint, tmp_path, ("one",), profiles=profiles) as server:
        store = tmp_path / "data" / "modules"
        first = build_module(server.service.loaded.identity, "held", seed=4, kappa=1e-9)
        first.save(store / "first.safetensors")
        assert "held" in [module["name"] for module in server.admin("/modules").body["data"]]
        adopt_beside(server, "held")
        made = server.admin("/keys", {"name": "k", "enforced": ["held"]}).body
        ways = ({"path": "/p/safe/v1/completions", "key": ADMIN_KEY}, {"key": made["key"]})
        for way in ways:
            assert applied(server.complete(**way)) == ["held"]
        act(server, "held", "suspend")
        for way in ways:
            assert server.complete(**way).error["code"] == "module_unavailable"
        for seed in (4, 5):  # the one that was there before, and another
            build_module(server.service.loaded.identity, "held", seed=seed, kappa=1e-9).save(
                store / f"{seed}.safetensors"
            )
            (tmp_path / "modules" / f"{seed}.safetensors").write_bytes((store / f"{seed}.safetensors").read_bytes())
        problems = server.admin("/modules").body["problems"]
        assert problems and all("takedown's module" in problem["reason"] for problem in problems)
        for way in ways:
            assert server.complete(**way).error["code"] == "module_unavailable"


def adopt_beside(server: Live, name: str) -> None:
    """A takedown's module where a file of the name is active."""
    running = server.service
    module = build_module(running.loaded.identity, name, layer=1, seed=9)
    file = ObjectStore(running.settings.published_store).put(module.to_bytes())
    new = NewModule(name, module.digest, module.model.fingerprint, file, Origin.TAKEDOWN)
    act(server, running.registry.modules.adopt(new, 1.0)["id"], "activate?override=true")


def test_an_active_module_that_is_missing_is_told_and_never_done_without(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as server:
        adopt(server, "gone", "")
        key_of(server, "inference")
    for file in (tmp_path / "data" / "modules" / "objects").rglob("*.safetensors"):
        file.unlink()
    with live(checkpoint, tmp_path) as server:
        ready = server.call("/ready", key=ADMIN_KEY)
        assert (ready.status, ready.body["status"], ready.body["missing"]) == (200, "degraded", ["gone"])
        assert server.call("/ready").body == {"status": "degraded"}
        assert b"unbind_modules_missing 1.0" in server.call("/metrics", key=ADMIN_KEY).raw
        refused = server.complete(key=ADMIN_KEY, unbind={"modules": ["gone"]})
        assert (refused.status, refused.error["code"], refused.error["param"]) == (
            503,
            "module_unavailable",
            "unbind.modules",
        )
        assert server.complete(key=ADMIN_KEY).status == 200
        assert server.admin("/profiles/team", {"modules": ["gone"]}, "PUT").status == 200
        named, unnamed = server.call("/ready", key=ADMIN_KEY), server.call("/ready")
        assert named.status == unnamed.status == 503
        assert "gone" in named.error["message"] and "gone" not in unnamed.error["message"]
        act(server, "gone", "suspend")
        assert server.call("/ready").body == {"status": "ready"}


@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_a_data_folder_that_is_lost_is_noticed_at_once(
    checkpoint: Path, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"name": "t", "rows": [{"text": "def add(a, b):\n    return a + b\n" * 8}]}
    data, kept = tmp_path / "data", tmp_path / "kept"
    with live(checkpoint, tmp_path, refresh_seconds=0.02) as server, caplog.at_level(logging.WARNING):
        assert server.call("/ready").status == 200
        data.rename(kept)
        if way == "replaced":
            data.mkdir()
        for refused in (
            server.admin("/takedowns", rows),
            server.admin("/keys", {"name": "k"}),
            server.admin("/modules"),
            server.call("/ready"),
        ):
            assert (refused.status, refused.error["code"]) == (503, "data_lost")
            assert way in refused.error["message"] and "put the data folder back" in refused.error["message"]
        assert server.complete().status == 200
        until(lambda: "database: fails" in caplog.text)
        time.sleep(0.3)  # a dozen refreshes
        assert not (data / "unbind.sqlite").exists()
        if way == "replaced":
            # A connection that was made just before makes its log where the file was, a change that was done then the trail's head.
            assert {path.name for path in data.iterdir()} <= {"unbind.sqlite-wal", "unbind.sqlite-shm", "audit.head"}
            shutil.rmtree(data)
        kept.rename(data)
        until(lambda: "database: works again" in caplog.text)
        assert server.call("/ready").status == 200 and server.admin("/takedowns", rows).status == 202
    told = [
        record for record in caplog.records if record.name == "unbind.service" and "database" in record.getMessage()
    ]
    assert len(told) == 2 and not any(record.exc_info for record in caplog.records)


def test_a_job_that_is_followed_ends_its_stream_when_the_data_is_lost(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"name": "t", "rows": [{"text": "def add(a, b):\n    return a + b\n" * 8}]}
    with live(checkpoint, tmp_path) as server:
        job = server.admin("/takedowns", rows).body["job_id"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", f"/admin/v1/jobs/{job}/events", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        answer = connection.getresponse()
        assert answer.readline() == b"event: progress\n"
        (tmp_path / "data").rename(tmp_path / "kept")
        assert b"queued" in answer.read()  # to the end of the stream
        connection.close()
    assert not any(record.exc_info for record in caplog.records)


def test_a_replaced_database_file_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as server:
        database = tmp_path / "data" / "unbind.sqlite"
        copy = database.read_bytes()
        database.unlink()
        database.with_name("other").write_bytes(copy)
        database.with_name("other").rename(database)
        refused = server.admin("/modules")
        assert (refused.status, refused.error["code"]) == (503, "data_lost") and "replaced" in refused.error["message"]


def test_keys_are_revoked_while_modules_cannot_be_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with live(checkpoint, tmp_path, refresh_seconds=0.02) as server:
        made = server.admin("/keys", {"name": "k"}).body

        def broken() -> None:
            raise RuntimeError("whatever a store may raise")

        monkeypatch.setattr(server.service.store, "scan", broken)
        until(lambda: "modules of this server: fails" in caplog.text)
        registry = open_registry(server.service.settings)
        Access(registry.transactions).revoke_key(made["id"], Actor("elsewhere"), 1.0)
        registry.close()
        until(lambda: server.complete(key=made["key"]).status == 401)
    assert caplog.text.count("modules of this server: fails") == 1


def test_a_module_that_cannot_be_loaded_keeps_no_other_away(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, ("one",)) as server:
        table = server.service.engine.modules
        reserve = table._reserve

        def room_for_little() -> None:
            if "greedy" in {table._names[key] for key in table.bank_names()}:
                raise UnbindError("no room")
            reserve()

        table._reserve = room_for_little
        for name in ("greedy", "modest"):
            made = build_module(server.service.loaded.identity, name, seed=len(name))
            made.save(tmp_path / "data" / "modules" / f"{name}.safetensors")
        listed = server.admin("/modules").body
        assert [module["name"] for module in listed["data"]] == ["modest", "one"]
        assert [problem["reason"] for problem in listed["problems"]] == ["no room"]
        assert server.complete(unbind={"modules": ["greedy"]}).error["code"] == "module_unavailable"
        assert applied(server.complete(unbind={"modules": ["modest", "one"]})) == ["modest", "one"]


def test_the_list_of_modules_is_given_in_pages(server: Live) -> None:
    whole = server.admin("/modules").body
    assert [module["name"] for module in whole["data"]] == ["one", "two"] and not whole["has_more"]
    first = server.admin("/modules?limit=1").body
    assert [module["name"] for module in first["data"]] == ["one"] and first["has_more"]
    rest = server.admin(f"/modules?limit=1&after={first['data'][0]['id']}").body
    assert [module["name"] for module in rest["data"]] == ["two"] and not rest["has_more"]
    for wrong, field in (("limit=0", "limit"), ("limit=1001", "limit"), ("after=nobody", "after")):
        refused = server.admin(f"/modules?{wrong}")
        assert (refused.status, refused.error["param"]) == (400, field)


def test_a_server_whose_engine_has_ended_is_not_ready(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(checkpoint, tmp_path) as running:
        engine = running.service.engine
        assert running.call("/ready").status == 200

        post = engine._post

        def broken(soon: bool = False) -> None:
            monkeypatch.setattr(engine, "_post", post)
            raise MemoryError("not even to send what there is")

        monkeypatch.setattr(engine, "_post", broken)
        engine.gates().result(20)  # so that it turns once
        until(lambda: not engine.healthy)
        refused = running.call("/ready")
        assert refused.status == 503 and "the engine has ended" in refused.error["message"]
        assert running.complete().status == 503 and running.call("/health").status == 200
