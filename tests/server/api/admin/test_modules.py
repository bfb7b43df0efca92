"""Modules over HTTP: every way to name them, together; what is enforced is never left out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.registry.objects import ObjectStore
from server.registry.records import NewModule
from server.registry.tables import Origin
from tests.support.live import ADMIN_KEY, Live, live
from tests.support.modules import build_module

HEADER = "x-unbind-modules"


def applied(answer: Any) -> list[str]:
    """The names in the answer's header."""
    assert answer.status == 200, answer.raw
    return sorted(label.split("@")[0] for label in answer.headers.get(HEADER, "").split(",") if label)


def test_body_header_alias_and_path_say_the_same(server: Live) -> None:
    plain = server.complete()
    ways: list[dict[str, Any]] = [
        {"unbind": {"modules": {"one": 0.5}}},
        {"headers": {"X-Unbind-Modules": "one=0.5"}},
        {"model": "tiny~safe"},
        {"path": "/p/safe/v1/completions"},
    ]
    answers = [server.complete(**way) for way in ways]
    assert all(applied(answer) == ["one"] for answer in answers) and applied(plain) == []
    assert len({answer.text for answer in answers}) == 1 and answers[0].text != plain.text
    full = server.complete(unbind={"modules": ["one"]})
    assert full.text not in (plain.text, answers[0].text)
    label = full.headers[HEADER]
    assert label == server.service.engine.modules.current["one"].label and len(label.split("@")[1]) == 12


def test_sources_unite(server: Live) -> None:
    answer = server.complete(path="/p/safe/v1/completions", headers={"X-Unbind-Modules": "two"})
    assert applied(answer) == ["one", "two"]
    assert applied(server.complete(path="/p/strict/v1/completions", model="tiny~safe")) == ["one", "two"]


def test_every_route_that_generates_takes_a_profile(server: Live) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
        "/v1/fim/completions": {"prompt": "def a(", "suffix": "\n"},
        "/fim/completions": {"prompt": "def a(", "suffix": "\n"},
        "/infill": {"input_prefix": "def a(", "input_suffix": "\n"},
    }
    for path, body in bodies.items():
        answer = server.call(f"/p/strict{path}", {**body, "max_tokens": 2})
        assert applied(answer) == ["one", "two"], path


def test_what_does_not_exist_is_named(server: Live) -> None:
    unknown = server.complete(unbind={"modules": ["onr"]})
    assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (400, "unknown_module", "unbind.modules")
    assert "did you mean one" in unknown.error["message"]
    profile = server.complete(path="/p/nobody/v1/completions")
    assert (profile.status, profile.error["code"]) == (404, "profile_not_found")
    routes = server.call("/openapi.json").body["paths"]
    asked = 0
    for path, methods in routes.items():
        if not path.startswith(("/admin", "/console", "/health", "/ready", "/metrics", "/version")) and path != "/":
            refused = server.call(f"/p/nobody{path}", {} if "post" in methods else None)
            assert (refused.status, refused.error["code"]) == (404, "profile_not_found"), path
            asked += 1
    assert asked >= 14
    for path, body in (("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": [5]})):
        assert server.call(f"/p/safe{path}", {**body, "model": "tiny~safe"}).status == 200
        assert server.call(path, {**body, "model": "other"}).error["code"] == "model_not_found"
    said = {"messages": [{"role": "user", "content": "a"}], "model": "other"}
    assert server.call("/apply-template", said).error["code"] == "model_not_found"
    alias = server.complete(model="tiny~nobody")
    assert (alias.status, alias.error["code"]) == (404, "model_not_found") and "tiny~safe" in alias.error["message"]
    assert server.call("/p/safe/admin/v1/keys").status == 404


def test_the_list_of_models_has_an_alias_for_each_profile(server: Live) -> None:
    listed = server.call("/v1/models").body["data"]
    assert [model["id"] for model in listed] == ["tiny", "tiny~safe", "tiny~strict"]
    for model in listed:
        assert server.call(f"/v1/models/{model['id']}").body == model


def test_a_report_says_which_modules_ran_and_how_strongly(server: Live) -> None:
    answer = server.complete(unbind={"modules": {"one": 0.5}, "report": True})
    (module,) = answer.body["choices"][0]["unbind"]["modules"]
    assert (module["name"], module["strength"], module["module"]) == ("one", 0.5, answer.headers[HEADER])
    assert module["open"] <= module["positions"]
    streamed = server.complete(unbind={"modules": {"one": 0.5}, "report": True}, stream=True)
    *_, last, done = streamed.events
    assert done == "[DONE]" and last["choices"][0]["unbind"]["modules"] == [module]


@pytest.fixture(scope="module")
def enforcing(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server where ``two`` is enforced by the settings and ``four`` by a policy; ``one`` is in shadow."""
    folder = tmp_path_factory.mktemp("enforcing")
    modules = ("one", "two", "three", "four")
    with live(checkpoint, folder, modules, enforced={"two": 0.5}, profiles={"safe": {"modules": ["one"]}}) as running:
        put = running.admin("/policies/global", {"enforced": ["four"], "shadow": ["one"]}, "PUT")
        assert put.status == 200, put.raw
        yield running


def test_enforced_modules_apply_to_whoever_asks_for_nothing(enforcing: Live) -> None:
    assert applied(enforcing.complete()) == ["four", "two"]


@pytest.mark.parametrize(
    "way",
    [
        {"unbind": {"modules": ["-two"]}},
        {"unbind": {"modules": {"two": 0}}},
        {"headers": {"X-Unbind-Modules": "-four"}},
        {"headers": {"X-Unbind-Modules": "two=0"}, "unbind": {"modules": ["two"]}},
    ],
)
def test_switching_one_off_is_forbidden(enforcing: Live, way: dict[str, Any]) -> None:
    refused = enforcing.complete(**way)
    assert (refused.status, refused.error["code"]) == (403, "module_enforced")
    assert refused.headers["x-should-retry"] == "false"


def test_random_attempts_over_every_source_keep_what_is_enforced(enforcing: Live) -> None:
    rng = random.Random(1)
    names = ("one", "two", "three", "four", "-two", "-four", "two=0.1", "four=0", "TWO", "", "*", "none", "two@old")
    outcomes = Counter[int]()
    for _ in range(150):
        way: dict[str, Any] = {"max_tokens": 1}
        if rng.random() < 0.5:
            way["unbind"] = rng.choice(
                ({"modules": rng.sample(names, 2)}, {"modules": {rng.choice(names): rng.choice((0, 0.1, 1))}}, {}, None)
            )
        if rng.random() < 0.5:
            way["headers"] = {"X-Unbind-Modules": ",".join(rng.sample(names, 2))}
        if rng.random() < 0.3:
            way["model"] = rng.choice(("tiny", "tiny~safe", "tiny~"))
        if rng.random() < 0.3:
            way["path"] = rng.choice(("/p/safe/v1/completions", "/p/none/v1/completions", "/p//v1/completions"))
        answer = enforcing.complete(**way)
        outcomes[answer.status] += 1
        assert answer.status != 200 or {"two", "four"} <= set(applied(answer)), way
    assert outcomes.keys() == {200, 400, 403, 404} and outcomes[200] > 20


def test_a_module_in_shadow_is_measured_and_changes_nothing(enforcing: Live) -> None:
    def evaluated() -> int:
        return enforcing.service.engine.gate_counts().result(10)["one"]["prefill"][0]

    before, shadowed = evaluated(), enforcing.complete(prompt="class Reader:")
    assert evaluated() > before and "one" not in applied(shadowed)
    on = enforcing.complete(prompt="class Reader:", unbind={"modules": ["one"]})
    assert "one" in applied(on) and on.text != shadowed.text
    enforcing.admin("/policies/global", {"enforced": ["four"]}, "PUT")
    before = evaluated()
    assert enforcing.complete(prompt="class Reader:").text == shadowed.text and evaluated() == before
    enforcing.admin("/policies/global", {"enforced": ["four"], "shadow": ["one"]}, "PUT")


def test_nothing_is_served_without_an_enforced_module(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, ("one",), enforced={"lost": 1.0}) as running:
        for answer in (running.complete(), running.complete(unbind={"modules": ["one"]}), running.call("/ready")):
            assert (answer.status, answer.error["code"]) == (503, "module_unavailable")
            assert 0 < int(answer.headers["retry-after"]) <= 120
        assert running.call("/health").status == 200


def adopt(server: Live, name: str, scope: str) -> None:
    """A module as a takedown would have left it."""
    service = server.service
    module = build_module(service.loaded.identity, name, layer=1, seed=9)
    file = ObjectStore(service.settings.published_store).put(module.to_bytes())
    new = NewModule(name, module.digest, module.model.fingerprint, file, Origin.TAKEDOWN, scope=scope)
    service.registry.modules.adopt(new, 1.0)
    assert name in [entry["name"] for entry in server.admin("/modules").body["data"]]


def act(server: Live, name: str, action: str) -> None:
    answer = server.call(f"/admin/v1/modules/{name}/{action}", key=ADMIN_KEY, method="POST", headers={"If-Match": "*"})
    assert answer.status == 200, answer.raw


def evaluated(server: Live, name: str) -> int:
    """How many positions a module's gates were asked about."""
    metrics = server.call("/metrics").raw.decode()
    lines = (line for line in metrics.splitlines() if line.startswith("unbind_gate_evaluations_total"))
    return sum(int(float(line.split()[-1])) for line in lines if f'"{name}"' in line)


def test_an_active_module_applies_in_the_scope_that_its_record_names(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, profiles={"safe": {"modules": ["one"]}}) as server:
        plain = server.complete()
        adopt(server, "by-name", "")
        adopt(server, "in-safe", "profile:safe")
        assert applied(server.complete()) == [] and server.complete().text == plain.text
        assert applied(server.complete(path="/p/safe/v1/completions")) == ["in-safe", "one"]
        adopt(server, "for-all", "global")
        filtered = server.complete()
        assert applied(filtered) == ["for-all"] and filtered.text != plain.text
        refused = server.complete(unbind={"modules": {"for-all": 0}})
        assert (refused.status, refused.error["code"]) == (403, "module_enforced")
        made = server.admin("/keys", {"name": "k", "allowed": []}).body
        adopt(server, "of-key", f"key:{made['id']}")
        assert applied(server.complete(key=made["key"])) == ["for-all", "of-key"]
        assert applied(server.complete(key=ADMIN_KEY)) == ["for-all"]
        act(server, "for-all", "retire")
        assert server.complete(key=ADMIN_KEY).text == plain.text


def test_a_module_in_shadow_is_measured_and_never_applied(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as server:
        plain = server.complete()
        adopt(server, "quiet", "global")
        act(server, "quiet", "suspend")
        act(server, "quiet", "shadow")
        before = evaluated(server, "quiet")
        for way in ({}, {"unbind": {"modules": ["quiet"]}}, {"headers": {"X-Unbind-Modules": "quiet=3"}}):
            answer = server.complete(**way)
            assert applied(answer) == [] and answer.text == plain.text
        assert evaluated(server, "quiet") > before
        assert server.admin("/policies/global", {"enforced": ["quiet"]}, "PUT").body["missing"] == ["quiet"]
        assert server.complete().error["code"] == "module_unavailable" and server.call("/ready").status == 503
        act(server, "quiet", "activate?override=true")
        assert applied(server.complete()) == ["quiet"] and server.call("/ready").status == 200


def test_an_active_module_that_cannot_be_loaded_is_not_done_without_in_its_scope(
    checkpoint: Path, tmp_path: Path
) -> None:
    with live(checkpoint, tmp_path) as server:
        adopt(server, "gone", "global")
    for file in (tmp_path / "data" / "modules" / "objects").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    with live(checkpoint, tmp_path) as server:
        assert server.complete().error["code"] == "module_unavailable" and server.call("/ready").status == 503
        act(server, "gone", "retire")
        assert server.complete().status == 200


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/modules?all=true", "after, limit, name, state"),
        ("/takedowns?states=x&limit=2", "after, find, limit"),
        ("/jobs/x?a=", "none"),
    ],
)
def test_a_parameter_that_an_admin_route_does_not_know_is_refused(server: Live, path: str, known: str) -> None:
    name = path.partition("?")[2].partition("=")[0]
    refused = server.admin(path)
    assert (refused.status, refused.error["param"]) == (400, name), refused.raw
    assert refused.error["message"] == f"{name}: unknown parameter; this route takes {known}"
