"""The guard is a server of this kind: keys, scopes, profiles, takedowns, metrics and audit are what they are with a model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from server.proxy import upstream
from server.proxy.app import create_guard
from server.proxy.upstream import checked_address
from server.settings import Settings
from tests.server.proxy.conftest import ROW, takedown
from tests.support.live import ADMIN_KEY, Live, serving_app
from tests.support.upstream import DONE, EVENTS, Script, Upstream, answered, streamed
from unbind_core.errors import UnbindError

START = Callable[..., Live]
PROTECTED = Script([answered({"index": 0, "text": ROW, "finish_reason": "stop"})])


@pytest.fixture
def start(other: Upstream, tmp_path: Path) -> Iterator[START]:
    """Start a guard that guards nothing yet."""
    other.script = PROTECTED
    with ExitStack() as open_servers:

        def begin(**given: Any) -> Live:
            fields = {
                "upstream": other.url,
                "data_dir": tmp_path,
                "admin_key": ADMIN_KEY,
                "request_timeout": 20,
                **given,
            }
            settings = Settings(**fields)
            return open_servers.enter_context(serving_app(create_guard(settings, 0.05), settings))

        yield begin


def reason(guard: Live, **fields: Any) -> str:
    answer = guard.complete(**fields)
    assert answer.status == 200, answer.raw
    return str(answer.body["choices"][0]["finish_reason"])


def metric(guard: Live, name: str, key: str | None = ADMIN_KEY) -> float:
    lines = guard.call("/metrics", key=key).raw.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and not line.startswith("#"))


def test_a_guard_lives_as_a_module_does(start: START) -> None:
    guard = start()
    assert reason(guard) == "stop"  # nothing is guarded yet
    assert guard.admin("/takedowns", takedown("held", ROW, scope="global")).status == 202
    assert reason(guard) == "content_filter"
    assert metric(guard, 'unbind_guard_stops_total{module="held",route="/v1/completions"}') == 1
    for action, ends in (("suspend", "stop"), ("shadow", "stop"), ("suspend", "stop"), ("activate", "content_filter")):
        done = guard.call(f"/admin/v1/modules/guard:held/{action}", b"", key=ADMIN_KEY, headers={"If-Match": "*"})
        assert done.status == 200, done.raw
        assert reason(guard) == ends
    assert metric(guard, 'unbind_guard_would_block_total{module="held"') == 1
    entries = {entry["action"] for entry in guard.admin("/audit").body["data"]}
    assert {"guard.add", "guard.suspend", "guard.shadow"} <= entries


def test_a_module_cannot_be_fitted_here(start: START) -> None:
    guard = start()
    for protect in ("both", "module"):
        options = {"protect": protect, "guard": None}
        answer = guard.admin("/takedowns", takedown("held", ROW, **options))
        assert (answer.status, answer.error["param"]) == (400, "options.protect"), answer.raw
        assert "'guard'" in answer.error["message"]
    assert guard.admin("/takedowns").body["data"] == []


def test_what_must_apply_and_is_not_here_is_a_503(start: START, other: Upstream, tmp_path: Path) -> None:
    guard = start(enforced={"held": 1.0})
    asked = len(other.asked)
    for stream in (False, True):
        refused = guard.complete(stream=stream)
        assert (refused.status, refused.error["code"]) == (503, "module_unavailable")
    assert guard.call("/ready").status == 503
    assert len(other.asked) == asked
    made = guard.admin("/takedowns", takedown("held", ROW)).body
    assert reason(guard) == "content_filter"
    assert guard.call("/ready").body["guards"] == ["held"]
    (tmp_path / "modules" / made["guard"]["file"]).write_bytes(b"damaged")
    again = start(port=0)
    assert again.complete().status == 200  # nothing demands it in these settings
    refused = again.complete(unbind={"modules": ["held"]})
    assert (refused.status, refused.error["code"]) == (503, "module_unavailable")


def test_keys_scopes_and_rates(start: START, other: Upstream) -> None:
    guard = start()
    guard.admin("/takedowns", takedown("held", ROW, scope="global"))
    fields = {"name": "plain", "scopes": ["inference"], "tokens_per_minute": 600}
    key = guard.admin("/keys", fields).body["key"]
    seeing = guard.admin("/keys", {"name": "seeing", "scopes": ["inference", "report"]}).body["key"]
    assert guard.complete().status == 401
    assert "unbind" not in guard.complete(key=key).body["choices"][0]
    assert "blocked" in guard.complete(key=seeing).body["choices"][0]["unbind"]
    assert guard.complete(key=key, unbind={"report": True}).status == 403
    usage = {"prompt_tokens": 300, "completion_tokens": 600, "total_tokens": 900}
    other.script = Script([answered({"index": 0, "text": "x", "finish_reason": "stop"}, usage=usage)])
    assert guard.complete(key=key).status == 200
    other.script = Script([b"{}"], status=400)
    late = guard.complete(key=key)
    assert (late.status, late.error["code"]) == (429, "rate_limited")


def test_profiles_by_path_and_alias(start: START, other: Upstream) -> None:
    guard = start(profiles={"team": {}})
    guard.admin("/takedowns", takedown("held", ROW, scope="profile:team"))
    assert reason(guard) == "stop"
    assert reason(guard, path="/p/team/v1/completions") == "content_filter"
    assert reason(guard, model="theirs~team") == "content_filter"
    assert other.asked[-1].body["model"] == "theirs"
    assert reason(guard, headers={"X-Unbind-Modules": "held"}) == "content_filter"
    other.script = Script([json.dumps({"object": "list", "data": [{"id": "theirs", "object": "model"}]}).encode()])
    assert [card["id"] for card in guard.call("/v1/models").body["data"]] == ["theirs", "theirs~team"]
    other.script = Script([json.dumps({"id": "theirs", "object": "model"}).encode()])
    assert guard.call("/v1/models/theirs~team").body["id"] == "theirs~team"
    assert other.asked[-1].path == "/v1/models/theirs"
    asked = len(other.asked)
    for path in ("..%2f..%2fmetrics", "..", "a%2f..%2fb", "."):
        assert guard.call(f"/v1/models/{path}").status == 404
    assert len(other.asked) == asked
    other.script = Script([b'{"object": "list", "id": "x"}'])
    assert guard.call("/v1/models/x").status == 502


@pytest.mark.parametrize(
    ("card", "code"),
    [
        (b'{"error": {"message": "no"}}', "upstream_error"),
        (b'{"object": "model", "data": [{"id": "\\ud83d"}]}', "unguardable_answer"),
        (b'{"object": "model", "data": [{"id": "x", "size": 1e999}]}', "unguardable_answer"),
    ],
)
def test_models_that_cannot_be_told_again_are_a_502(guard: Live, other: Upstream, card: bytes, code: str) -> None:
    other.script = Script([card])
    listed = guard.call("/v1/models")
    assert (listed.status, listed.error["code"]) == (502, code)
    if code == "unguardable_answer":
        assert guard.call("/v1/models/x").status == 502


def test_what_is_not_followed_is_not_passed_on(guard: Live, other: Upstream) -> None:
    asked = len(other.asked)
    for path in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/completion", "/v1/embeddings"):
        for prefix in ("", "/p/team"):
            answer = guard.call(
                prefix + path, {"input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            )
            assert (answer.status, answer.error["code"]) == (404, "unknown_route"), path
            assert "/v1/chat/completions" in answer.error["message"]
    assert len(other.asked) == asked


def test_another_server_that_is_not_there_is_a_503(start: START) -> None:
    guard = start(upstream="http://127.0.0.1:9")
    for stream in (False, True):
        answer = guard.complete(stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "upstream_unreachable")
        assert answer.headers["retry-after"] == "5"
    assert guard.call("/ready").status == 200


def test_one_that_falls_silent_is_a_504(start: START, other: Upstream) -> None:
    guard = start(request_timeout=0.3)
    other.script = Script([(5.0, b"{}")])
    late = guard.complete()
    assert (late.status, late.error["code"]) == (504, "request_timeout")
    other.script = Script([streamed(["x"])[0], (5.0, DONE)], EVENTS)
    assert guard.complete(stream=True).events[-2]["error"]["code"] == "request_timeout"
    assert other.asked[-1].left.wait(5)


def test_requests_that_run_when_the_server_ends_are_told_so(start: START, other: Upstream) -> None:
    guard = start(drain_timeout=0.2)
    other.script = Script([streamed(["x"])[0], (30.0, DONE)], EVENTS)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(guard.complete(stream=True)))
    asking.start()
    deadline = time.monotonic() + 10
    while not guard.service._running and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.01)
    time.sleep(0.1)  # its first event is on its way
    loop = guard.service._tasks[0].get_loop()
    asyncio.run_coroutine_threadsafe(guard.service.drain(), loop).result(10)
    asking.join(10)
    assert answers[0].events[-2]["error"]["code"] == "shutting_down"
    assert other.asked[-1].left.wait(5)
    assert guard.complete().error["code"] == "shutting_down"


def test_what_comes_behind_an_answer_is_no_answer_to_the_next_request() -> None:
    """A length that is stated too short, or an answer that nobody asked for: either belongs to nobody."""
    opened, closed, ended = 0, 0, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened, closed
        opened += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                for number in range(3):
                    said = b'{"id": %d}' % (10 * opened + number)
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n" + said
                    )
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        closed += 1
        if closed == opened:
            ended.set()

    async def ask() -> list[bytes]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        other = upstream.Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "")
        found = []
        for _ in range(3):
            async with other.asked("/v1/models", None, "application/json") as response:
                found.append(await upstream.whole(response))
        await other.close()
        await asyncio.wait_for(ended.wait(), 5)
        server.close()
        return found

    assert asyncio.run(ask()) == [b'{"id": 10}', b'{"id": 20}', b'{"id": 30}']


def test_addresses(tmp_path: Path) -> None:
    assert checked_address("http://host:8001/v1/") == "http://host:8001"
    assert checked_address("https://host/base") == "https://host/base"
    for wrong in ("", "host:80", "ftp://host", "http://", "http://name:word@host", "http://host/?a=b"):
        with pytest.raises(UnbindError, match="--upstream"):
            checked_address(wrong)
