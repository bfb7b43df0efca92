"""Keys, profiles and policies: made, listed, held to, revoked; and a server that is not open by mistake."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli import build
from server.exposure import Exposed, check_exposure, on_loopback
from server.ratelimit import RateLimiter
from server.registry.access import Access, kept_admin_key, key_digest
from server.registry.audit import Actor
from server.registry.registry import open_registry
from server.rules import Rules
from server.settings import Settings
from tests.support.live import ADMIN_KEY, Answer, Live, live

MODELS = "/v1/models"


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that somebody has made a key for."""
    with live(checkpoint, tmp_path_factory.mktemp("guarded"), profiles={"safe": {"modules": ["one"]}}) as running:
        make(running, name="first")
        yield running


def make(server: Live, **fields: Any) -> tuple[str, str]:
    """Id and text of a new key."""
    made = server.admin("/keys", {"name": "test", **fields})
    assert made.status == 201, made.raw
    return made.body["id"], made.body["key"]


def refusal(answer: Answer) -> tuple[int, str]:
    """Status and code."""
    return answer.status, answer.error["code"]


def test_who_sends_a_key_that_is_unknown_hears_so_and_who_sends_none_what_to_send(guarded: Live) -> None:
    for path in ("/v1/completions", "/v1/messages", "/admin/v1/keys", "/metrics"):
        body = None if path in ("/admin/v1/keys", "/metrics") else {"prompt": "a"}
        sent: dict[str, Any]
        for sent in ({"key": "ubk_wrong"}, {"headers": {"x-api-key": "ubk_wrong"}}):
            refused = guarded.call(path, body, **sent)
            assert refusal(refused) == (401, "invalid_api_key"), path
            assert refused.error["message"].startswith("the server does not know this key"), path
            assert ("admin.key in the server" in refused.error["message"]) is path.startswith("/admin")
        assert "send 'Authorization: Bearer KEY'" in guarded.call(path, body).error["message"], path


def test_once_a_key_exists_every_request_needs_one(guarded: Live) -> None:
    _, text = make(guarded)
    assert refusal(guarded.complete()) == refusal(guarded.complete(key="ubk_wrong")) == (401, "invalid_api_key")
    assert guarded.complete(key=text).status == guarded.complete(key=ADMIN_KEY).status == 200
    for header in ("api-key", "x-api-key"):
        assert guarded.complete(headers={header: text}).status == 200
    assert refusal(guarded.call(MODELS)) == refusal(guarded.call("/tokenize", {"content": "a"}))
    assert guarded.call("/health").status == guarded.call("/ready").status == 200


def test_a_prefix_is_taken_over_from_requests_of_the_same_key_alone(guarded: Live) -> None:
    prompt = "".join(f"value_{number} = {number}\n" for number in range(12))

    def taken(key: str) -> int:
        answer = guarded.complete(key=key, prompt=prompt, max_tokens=1)
        return int(answer.body["usage"]["prompt_tokens_details"]["cached_tokens"])

    (_, one), (_, other) = make(guarded), make(guarded)
    assert [taken(one), taken(other), taken(ADMIN_KEY)] == [0, 0, 0]
    assert all(taken(key) > 8 for key in (one, other, ADMIN_KEY))


def test_a_form_is_compiled_for_each_key_anew(guarded: Live) -> None:
    """How long it takes would else tell one key what another has asked for."""
    keys = [make(guarded) for _ in range(2)]
    for _, key in (*keys, ("admin", ADMIN_KEY)):
        assert guarded.complete(key=key, structured_outputs={"choice": ["of each key"]}).text == "of each key"
    known = guarded.service.engine.grammars._known
    owners = {owner for owner, source in known if "of each key" in source}
    assert owners == {keys[0][0], keys[1][0], "admin"}


def test_a_key_is_shown_once_and_stored_as_its_hash(guarded: Live) -> None:
    key_id, text = make(guarded, name="only once")
    listed = guarded.admin("/keys")
    assert text not in listed.raw.decode() and key_id in {key["id"] for key in listed.body["data"]}
    database = guarded.service.settings.data_dir / "unbind.sqlite"
    stored = b"".join(path.read_bytes() for path in database.parent.glob(database.name + "*"))
    assert text.encode() not in stored and key_digest(text).encode() in stored


def test_scopes_are_held_to(guarded: Live) -> None:
    _, admin = make(guarded, scopes=["admin"])
    _, plain = make(guarded, scopes=["inference"])
    _, reporter = make(guarded, scopes=["inference", "report"])
    assert guarded.call("/admin/v1/keys", key=admin).status == 200
    assert guarded.call("/admin/v1/modules", key=admin).status == 200
    assert refusal(guarded.complete(key=admin)) == refusal(guarded.call("/admin/v1/keys", key=plain))
    assert refusal(guarded.call("/admin/v1/keys", key=plain)) == (403, "missing_scope")
    assert guarded.complete(key=reporter, unbind={"report": True}).status == 200
    refused = guarded.complete(key=plain, unbind={"report": True})
    assert (refused.status, refused.error["param"]) == (403, "unbind.report")


def test_a_key_brings_its_own_modules_and_limits(guarded: Live) -> None:
    _, enforced = make(guarded, enforced=["two"], allowed=["one"])
    assert guarded.complete(key=enforced).headers["x-unbind-modules"].startswith("two@")
    assert guarded.complete(key=enforced, unbind={"modules": ["one"]}).headers["x-unbind-modules"].count("@") == 2
    assert refusal(guarded.complete(key=enforced, unbind={"modules": ["-two"]})) == (403, "module_enforced")
    _, narrow = make(guarded, allowed=["one"])
    assert refusal(guarded.complete(key=narrow, unbind={"modules": ["two"]})) == (403, "module_not_allowed")
    assert guarded.complete(key=narrow, unbind={"modules": ["one"]}).status == 200
    _, profiled = make(guarded, profile="safe")
    assert guarded.complete(key=profiled).headers["x-unbind-modules"].startswith("one@")
    made = guarded.admin("/keys", {"name": "mistyped", "enforced": ["two", "tow"]}).body
    assert made["missing"] == ["tow"] and refusal(guarded.complete(key=made["key"])) == (503, "module_unavailable")
    assert [key["missing"] for key in guarded.admin("/keys").body["data"] if key["id"] == made["id"]] == [["tow"]]


def test_expired_and_revoked_keys_are_useless(guarded: Live) -> None:
    key_id, text = make(guarded)
    assert guarded.complete(key=text).status == 200
    assert guarded.admin(f"/keys/{key_id}", method="DELETE").body["revoked_at"] > 0
    assert refusal(guarded.complete(key=text)) == (401, "invalid_api_key")
    _, short = make(guarded, expires_in=0.05)
    time.sleep(0.06)
    assert "expired" in guarded.complete(key=short).error["message"]
    assert refusal(guarded.admin("/keys/key_nobody", method="DELETE")) == (404, "key_not_found")


def test_a_key_may_ask_only_so_often(guarded: Live) -> None:
    _, text = make(guarded, requests_per_minute=6, burst=2)
    statuses = [guarded.complete(key=text, max_tokens=1).status for _ in range(2)]
    refused = guarded.complete(key=text, max_tokens=1)
    assert statuses == [200, 200] and refusal(refused) == (429, "rate_limited")
    assert 0 < int(refused.headers["retry-after"]) <= 10 and "x-should-retry" not in refused.headers


def test_every_answer_of_a_call_counts(guarded: Live) -> None:
    _, text = make(guarded, requests_per_minute=6, burst=6)
    batch = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1, "key": text}
    assert guarded.complete(**batch).status == 200  # four of six
    refused = guarded.complete(**batch)  # which itself counted for one
    assert refusal(refused) == (429, "rate_limited") and 20 < int(refused.headers["retry-after"]) <= 30
    assert guarded.complete(max_tokens=1, key=text).status == 200
    assert refusal(guarded.complete(max_tokens=1, key=text)) == (429, "rate_limited")
    _, other = make(guarded, requests_per_minute=6, burst=6)
    never = guarded.complete(prompt=["a"] * 7, max_tokens=1, key=other)
    assert refusal(never) == (400, "batch_too_large") and "6 at once" in never.error["message"]
    _, free = make(guarded)
    assert guarded.complete(prompt=["a"] * 7, max_tokens=1, key=free).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_prompts_and_answers_count_and_what_is_owed_is_waited_for(guarded: Live, stream: bool) -> None:
    key_id, text = make(guarded, tokens_per_minute=60)
    shown = next(key for key in guarded.admin("/keys").body["data"] if key["id"] == key_id)
    assert shown["tokens_per_minute"] == 60 and shown["requests_per_minute"] is None
    ask = {"key": text, "ignore_eos": True, "stream": stream}
    assert guarded.complete(prompt=[9] * 40, max_tokens=2, **ask).status == 200
    assert guarded.complete(prompt=[9] * 8, max_tokens=50, **ask).status == 200  # there were some left
    refused = guarded.complete(prompt=[9], max_tokens=1, **ask)
    assert refusal(refused) == (429, "rate_limited") and "tokens a minute" in refused.error["message"]
    assert 30 < int(refused.headers["retry-after"]) <= 41  # 40 are owed, and one a second comes


def test_a_bucket_owes_what_was_spent_beyond_it() -> None:
    limiter = RateLimiter()
    limiter.spend("k", 60, 10, 0.0, 25)
    assert limiter.wait("k", 60, 10, 0.0) == 16 and limiter.wait("k", 60, 10, 16.0) == 0
    assert limiter.take("k", 60, 10, 20.0, 6) == 1 and limiter.take("k", 60, 10, 20.0, 5) == 0


def test_a_bucket_refills_with_time() -> None:
    limiter = RateLimiter()
    assert [limiter.take("k", 60, 2, 0.0) for _ in range(3)] == [0, 0, 1]
    assert limiter.take("k", 60, 2, 0.5) == 0.5 and limiter.take("k", 60, 2, 1.0) == 0
    assert [limiter.take("k", 60, 2, 1000.0) for _ in range(3)] == [0, 0, 1]
    assert limiter.take("other", 60, 2, 1000.0) == 0


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({}, "name", 400),
        ({"name": ""}, "name", 400),
        ({"name": "a\x00b"}, "name", 400),
        ({"name": "a", "scopes": ["root"]}, "scopes.0", 400),
        ({"name": "a", "expires_in": -1}, "expires_in", 400),
        ({"name": "a", "requests_per_minute": 0}, "requests_per_minute", 400),
        ({"name": "a", "enforced": {"one": -1}}, "enforced.one", 400),
        ({"name": "a", "profile": "nobody"}, "profile", 404),
        ({"name": "a", "expires_in": 1, "expires_at": 5e9}, "expires_in", 400),
        ({"name": "a", "expires_at": 5}, "expires_at", 400),
        ({"name": "a", "burst": 2}, "burst", 400),
        ({"name": "a", "burst": 2, "tokens_per_minute": 60}, "burst", 400),
        ({"name": "a", "key": "mine"}, "key", 400),
    ],
)
def test_a_bad_key_is_refused_by_the_name_of_its_field(guarded: Live, body: Any, param: str, status: int) -> None:
    refused = guarded.admin("/keys", body)
    assert (refused.status, refused.error["param"]) == (status, param), refused.raw


def test_rules_that_somebody_else_changed_are_not_written_over(guarded: Live) -> None:
    guarded.admin("/profiles/shared", {"modules": ["one"]}, method="PUT")
    for path in ("/policies/global", "/profiles/shared", "/policies/profile:shared"):

        def put(rules: dict[str, Any], expected: str, path: str = path) -> Answer:
            return guarded.call("/admin/v1" + path, rules, key=ADMIN_KEY, method="PUT", headers={"If-Match": expected})

        seen = guarded.admin(path).headers["etag"]
        first = put({"shadow": ["two"]}, seen)
        assert first.status == 200 and first.headers["etag"] == guarded.admin(path).headers["etag"] != seen
        second = put({"shadow": ["one"]}, seen)
        assert refusal(second) == (412, "stale") and guarded.admin(path).body["shadow"] == ["two"]
        assert put({}, first.headers["etag"]).status == put({}, "*").status == 200


def test_a_profile_that_somebody_else_made_is_not_made_again(guarded: Live) -> None:
    def make_profile(rules: dict[str, Any], condition: str = "*") -> Answer:
        given = {"If-None-Match": condition}
        return guarded.call("/admin/v1/profiles/twice", rules, key=ADMIN_KEY, method="PUT", headers=given)

    assert make_profile({"modules": ["one"]}).status == 200
    assert refusal(make_profile({})) == (412, "already_there")
    assert guarded.admin("/profiles/twice").body["modules"] == {"one": 1.0}
    assert make_profile({}, '"an-etag"').error["param"] == "if-none-match"
    guarded.admin("/profiles/twice", method="DELETE")


def test_profiles_and_policies_take_effect_at_once(guarded: Live) -> None:
    assert guarded.admin("/profiles/team", {"modules": {"one": 0.5}, "enforced": ["two"]}, "PUT").status == 200
    assert "tiny~team" in {model["id"] for model in guarded.call(MODELS, key=ADMIN_KEY).body["data"]}
    answer = guarded.complete(key=ADMIN_KEY, model="tiny~team")
    assert answer.headers["x-unbind-modules"].count("@") == 2
    assert guarded.admin("/policies/profile:team").body["modules"] == {"one": 0.5}
    assert guarded.admin("/profiles/team", method="DELETE").status == 200
    assert guarded.complete(key=ADMIN_KEY, model="tiny~team").status == 404
    key_id, text = make(guarded)
    lost = guarded.admin(f"/policies/key:{key_id}", {"enforced": ["one", "lost"]}, "PUT")
    assert lost.body["missing"] == ["lost"] and refusal(guarded.complete(key=text)) == (503, "module_unavailable")
    assert guarded.admin(f"/policies/key:{key_id}", {"enforced": ["one"]}, "PUT").body["missing"] == []
    assert guarded.complete(key=text).headers["x-unbind-modules"].startswith("one@")
    assert guarded.admin("/policies/global").body["enforced"] == {}
    assert refusal(guarded.admin("/policies/everything")) == (404, "scope_not_found")
    assert refusal(guarded.admin("/profiles/safe", {}, "PUT")) == (409, "profile_fixed")
    assert guarded.admin("/profiles/gpt-o1", {}, "PUT").status == 400


def test_a_key_whose_profile_is_gone_is_not_served_without_it(guarded: Live) -> None:
    guarded.admin("/profiles/passing", {"enforced": ["one"]}, "PUT")
    _, text = make(guarded, profile="passing")
    guarded.admin("/profiles/passing", method="DELETE")
    assert refusal(guarded.complete(key=text)) == (503, "profile_unavailable")


def test_access_routes_need_the_admin_scope(guarded: Live) -> None:
    for method, path in (("GET", "/keys"), ("POST", "/keys"), ("PUT", "/profiles/a"), ("GET", "/policies/global")):
        answer = guarded.call(f"/admin/v1{path}", {} if method != "GET" else None, method=method)
        assert refusal(answer) == (401, "invalid_api_key")


def test_the_command_line_makes_lists_and_revokes(guarded: Live) -> None:
    folder = str(guarded.service.settings.data_dir)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(build(), ["key", *arguments, "--data-dir", folder])
        assert result.exit_code == 0, result.output
        return result.output

    made = json.loads(run("create", "by hand", "--enforce", "two", "--per-minute", "60", "--days", "1", "--json"))
    guarded.service.access.refresh()  # the server does it every second
    assert guarded.complete(key=made["key"]).headers["x-unbind-modules"].startswith("two@")
    assert made["key"] not in run("list")
    (line,) = [line for line in run("list").splitlines() if line.startswith(made["id"])]  # however narrow the screen
    assert "by hand" in line and " inference " in line and line.endswith("  usable")
    assert "revoked" in run("revoke", made["id"])
    again = json.loads(run("revoke", made["id"], "--json"))
    assert again["id"] == made["id"] and again["revoked_at"] and again["warnings"] == []
    guarded.service.access.refresh()
    assert guarded.complete(key=made["key"]).status == 401
    guarded.service.access.create_key("for ever", Actor("operator", "x"), time.time(), expires_at=1e15)
    assert "9999" in run("list")
    keys = len(guarded.service.access.current.keys)
    for code, wrong in (
        (1, ["x", "--scope", "root"]),
        (1, ["x", "--days", "0"]),
        (1, ["x", "--burst", "2"]),
        (1, ["y" * 101]),
        (1, ["two\nlines"]),
        (2, ["x", "--days", "inf"]),
        (2, ["x", "--days", "10000000"]),
        (2, ["x", "--per-minute", "inf"]),
        (2, ["x", "--tokens-per-minute", "inf"]),
    ):
        assert CliRunner().invoke(build(), ["key", "create", *wrong, "--data-dir", folder]).exit_code == code, wrong
    guarded.service.access.refresh()
    assert len(guarded.service.access.current.keys) == keys
    assert guarded.admin("/keys").status == 200


def test_the_command_line_makes_a_key_only_for_a_profile_that_is_there(guarded: Live, tmp_path: Path) -> None:
    guarded.admin("/profiles/kept", {"enforced": ["one"]}, "PUT")
    config = tmp_path / "unbind.toml"
    config.write_text('profiles = {safe = {modules = ["one"]}}')
    create = ["key", "create", "x", "--data-dir", str(guarded.service.settings.data_dir), "--profile"]
    for given in (["kept"], ["safe", "--config", str(config)]):
        assert CliRunner().invoke(build(), [*create, *given]).exit_code == 0
    before = guarded.service.registry.audit(limit=1000)
    wrong = CliRunner().invoke(build(), [*create, "nosuch", "--config", str(config)])
    assert wrong.exit_code == 1 and "--profile: 'nosuch' does not exist; there are: kept, safe" in wrong.output
    assert guarded.service.registry.audit(limit=1000) == before
    guarded.admin("/profiles/kept", method="DELETE")


def test_beyond_loopback_a_server_needs_a_key_or_somebody_s_word(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        assert on_loopback(Settings(host=host))
        check_exposure(Settings(host=host, data_dir=tmp_path))
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(Exposed, match="--insecure"):
            check_exposure(Settings(host=host, data_dir=tmp_path))
    check_exposure(Settings(host="0.0.0.0", data_dir=tmp_path, insecure=True))
    check_exposure(Settings(host="0.0.0.0", data_dir=tmp_path, admin_key="set"))
    registry = open_registry(Settings(data_dir=tmp_path))
    Access(registry.transactions).create_key("one", Actor("test"), time.time())
    registry.close()
    check_exposure(Settings(host="0.0.0.0", data_dir=tmp_path))


def test_keys_and_rules_are_read_again_only_where_somebody_has_changed_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, registry = Actor("test"), open_registry(Settings(data_dir=tmp_path))
    looking, elsewhere = Access(registry.transactions), Access(registry.transactions)
    key, _ = elsewhere.create_key("one", actor, time.time(), rules=Rules(enforced={"demo-a": 1.0}))
    looking.refresh()
    before = looking.current
    assert [one.id for one in before.keys.values()] == [key.id] and before.of(f"key:{key.id}").enforced
    looking.refresh()
    assert looking.current is before  # thousands of keys are not made anew every second
    elsewhere.revoke_key(key.id, actor, time.time())
    looking.refresh()
    assert [one.usable(time.time()) for one in looking.current.keys.values()] == [False]
    elsewhere.delete_rules(f"key:{key.id}", actor, time.time())
    looking.refresh()
    assert not looking.current.rules
    with registry.engine.begin() as connection:  # by hand, and told of nowhere
        connection.exec_driver_sql("DELETE FROM api_keys")
    monkeypatch.setattr("server.registry.audit.WHOLE_SECONDS", 1e-9)
    looking.refresh()
    assert not looking.current.keys
    registry.close()


def test_servers_that_start_at_once_on_one_data_folder_hold_one_admin_key(tmp_path: Path) -> None:
    settings, all_at_once = Settings(data_dir=tmp_path / "data"), Barrier(8)

    def start(_: int) -> str:
        all_at_once.wait()
        return kept_admin_key(settings)

    with ThreadPoolExecutor(8) as pool:
        (held,) = set(pool.map(start, range(8)))
    file = tmp_path / "data" / "admin.key"
    assert file.read_text() == held + "\n" and file.stat().st_mode & 0o777 == 0o600
    file.write_text("\n")  # damaged: a new one is made
    assert kept_admin_key(settings) not in (held, "") and kept_admin_key(settings) == file.read_text().strip()


def test_what_one_server_has_answered_the_next_call_finds_at_another(checkpoint: Path, tmp_path: Path) -> None:
    """Neither looks at what others wrote by the clock while this runs."""
    with live(checkpoint, tmp_path, refresh_seconds=3600) as a, live(checkpoint, tmp_path, refresh_seconds=3600) as b:
        key, _ = make(a)
        assert key in [found["id"] for found in b.admin("/keys").body["data"]]
        key, _ = make(a)
        assert b.admin(f"/policies/key:{key}", {"shadow": ["one"]}, "PUT").status == 200
        assert a.admin("/profiles/team", {}, "PUT").status == 200
        assert b.admin("/profiles/team").status == 200
        assert a.admin("/profiles/other", {}, "PUT").status == 200
        make(b, profile="other")
        key, _ = make(a)
        rows = [{"text": "def area(width, height):\n    return width * height\n" * 20}]
        asked = {"name": "held", "rows": rows, "options": {"protect": "guard", "scope": f"key:{key}"}}
        bound = b.admin("/takedowns", asked)
        assert (bound.status, bound.body.get("in_force")) == (202, "enforced")
        assert a.admin("/profiles/team", method="DELETE").status == 200
        asked |= {"name": "free", "options": {"protect": "guard", "scope": "profile:team"}}
        assert refusal(b.admin("/takedowns", asked)) == (400, "invalid_value")
