"""The guard in front of a scripted server: what passes, what is cut, and what is refused because nobody could follow it."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
import time
from typing import Any

import pytest

from server.proxy import relay
from server.proxy.events import parsed
from tests.server.proxy.conftest import ROW, RUN
from tests.support.live import Answer, Live
from tests.support.slow_matcher import longest_run
from tests.support.upstream import DONE, EVENTS, Script, Upstream, answered, event, streamed
from unbind_core.guard.sent import Sent

PIECES = [ROW[at : at + 4] for at in range(0, len(ROW), 4)]


def text_of(answer: Answer) -> str:
    return "".join(
        choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        for event in answer.events
        if event != "[DONE]"
        for choice in event.get("choices", ())
    )


def reasons(answer: Answer) -> list[str]:
    events = [event for event in answer.events if event != "[DONE]"]
    return [c["finish_reason"] for event in events for c in event.get("choices", ()) if c["finish_reason"]]


def chat(guard: Live, **fields: Any) -> Answer:
    return guard.call("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **fields})


def test_a_stream_without_a_run_passes_byte_for_byte(guard: Live, other: Upstream) -> None:
    usage = event({"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})
    parts = [b": waiting\n\n", *streamed(["one ", "two"]), usage, b"event: end\r\ndata: [DONE]\r\n\r\n"]
    torn = b"".join(parts)
    other.script = Script([torn[at : at + 7] for at in range(0, len(torn), 7)], EVENTS)
    before = guard.service.telemetry.generated_tokens._value.get()
    answer = guard.complete(stream=True, stream_options={"include_usage": True})
    assert answer.raw == torn
    assert answer.headers["x-unbind-modules"].startswith("held:guard@")
    assert guard.service.telemetry.generated_tokens._value.get() == before + 2


def test_a_whole_answer_without_a_run_passes_byte_for_byte(guard: Live, other: Upstream) -> None:
    raw = b' {"id": "x",\n "object":"y", "choices":[{"index":0,"message":{"role":"assistant","content":"two"}}]} '
    other.script = Script([raw[:9], raw[9:]])
    assert chat(guard).raw == raw


def test_a_run_ends_a_stream_and_the_other_server_is_let_go(guard: Live, other: Upstream) -> None:
    other.script = Script([*streamed(PIECES, chat=True), (5.0, b"data: {}\n\n")], EVENTS)
    answer = chat(guard, stream=True)
    assert reasons(answer) == ["content_filter"] and answer.raw.endswith(DONE)
    assert 0 < longest_run(text_of(answer), [ROW]) < RUN
    assert ROW.startswith(text_of(answer))
    blocked = answer.events[-2]["choices"][0]["unbind"]["blocked"]
    assert blocked["guard"].startswith("held:guard@") and blocked["takedown"].startswith("td_")
    other.script = Script([*streamed(PIECES[:-1], chat=True)[:-1], (30.0, DONE)], EVENTS)
    assert reasons(chat(guard, stream=True)) == ["content_filter"]
    assert other.asked[-1].left.wait(5)


def test_usage_that_was_asked_for_comes_behind_a_run(guard: Live, other: Upstream) -> None:
    usage = event(
        {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 90, "total_tokens": 93}}
    )
    other.script = Script([*streamed(PIECES), usage, DONE], EVENTS)
    answer = guard.complete(stream=True, stream_options={"include_usage": True})
    assert reasons(answer) == ["content_filter"]
    assert answer.events[-2]["usage"]["completion_tokens"] == 90


def test_a_run_ends_one_of_several_answers(guard: Live, other: Upstream) -> None:
    mine = {"index": 1, "text": "mine", "finish_reason": "length"}
    other.script = Script([answered({"index": 0, "text": "x = 1\n" + ROW, "finish_reason": "stop"}, mine)])
    cut, kept = guard.complete(n=2).body["choices"]
    assert cut["finish_reason"] == "content_filter" and cut["text"].startswith("x = 1\ndef")
    assert longest_run(cut["text"], [ROW]) < RUN
    assert kept == mine


def test_an_echo_is_the_clients_own_text(guard: Live, other: Upstream) -> None:
    raw = answered({"index": 0, "text": ROW + "x = 1", "finish_reason": "stop"})
    other.script = Script([raw])
    assert guard.complete(prompt=ROW, echo=True).raw == raw
    assert guard.complete(prompt=[1, 2, 3], echo=True).body["choices"][0]["finish_reason"] == "content_filter"
    half = ROW[: len(ROW) // 2]
    goes_on = guard.complete(prompt=half, echo=True).body["choices"][0]
    assert goes_on["finish_reason"] == "stop" or longest_run(goes_on["text"].removeprefix(half), [ROW]) < RUN


def test_what_a_client_sent_is_read_once_for_all_its_answers(
    guard: Live, other: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Sent] = []
    runs = Sent._runs
    monkeypatch.setattr(Sent, "_runs", lambda sent, *rest: (read.append(sent), runs(sent, *rest))[1])
    other.script = Script([answered(*({"index": index, "text": ROW, "thoughts": ROW} for index in range(6)))])
    answer = guard.complete(prompt=["one", "two"], n=3, user="a line of mine")
    assert [choice["finish_reason"] for choice in answer.body["choices"]] == ["content_filter"] * 6
    assert len(read) == 3  # each prompt, and what else was sent


def test_prompts_are_told_apart_by_their_answers(guard: Live, other: Upstream) -> None:
    given = [{"index": index, "text": ROW, "finish_reason": "stop"} for index in range(4)]
    other.script = Script([answered(*given)])
    choices = guard.complete(prompt=["mine", ROW], n=2).body["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["content_filter"] * 2 + ["stop"] * 2


def test_of_a_client_nothing_is_passed_on_but_what_it_asks(guard: Live, other: Upstream) -> None:
    other.script = Script([answered({"index": 0, "text": "x", "finish_reason": "stop"})])
    sent = {
        "Accept-Encoding": "gzip",
        "Cookie": "a=b",
        "X-Forwarded-For": "1.2.3.4",
        "Connection": "X-Own",
        "X-Own": "1",
    }
    asked = {"prompt": "x", "model": "theirs~team", "top_k": 5, "seed": 2**60, "unbind": {"report": True}, "none": None}
    assert guard.call("/v1/completions", asked, headers={**sent, "Authorization": "Bearer clients"}).status == 200
    came = other.asked[-1]
    assert came.body == {"prompt": "x", "model": "theirs", "top_k": 5, "seed": 2**60, "none": None}
    assert came.headers["authorization"] == "Bearer operators-key"
    assert came.headers["accept-encoding"] == "identity"
    assert not {"cookie", "x-forwarded-for", "x-own"} & came.headers.keys()
    assert guard.call("/v1/completions", {"prompt": "x", "model": ""}).status == 200
    assert other.asked[-1].body == {"prompt": "x"}


SMALL = answered({"index": 0, "text": "x", "finish_reason": "stop"})
START = streamed(["x"])[0]
UNREADABLE = [
    (False, Script([b"{"])),
    (False, Script([b"[]"])),
    (False, Script([b'{"choices": [], "choices": []}'])),
    (False, Script([b"[" * 100_000])),
    (False, Script([SMALL[:-1] + b', "more": ' + b'{"a": ' * 800 + b"1" + b"}" * 801])),
    (True, Script([START.rstrip()[:-1] + b', "more": ' + b'{"a": ' * 800 + b"1" + b"}" * 801 + b"\n\n"], EVENTS)),
    (False, Script([b"\xff\xfe"])),
    (False, Script([SMALL.decode().encode("utf-16")])),
    (False, Script([SMALL.replace(b'"x"', b'"\xed\xa0\x80"')])),
    (False, Script([SMALL], "text/plain")),
    (False, Script([SMALL], "application/json; charset=utf-16")),
    (False, Script([START, DONE], EVENTS)),
    (False, Script([gzip.compress(SMALL)], headers={"content-encoding": "gzip"})),
    (False, Script([answered({"index": 5, "text": "x"})])),
    (False, Script([answered({"index": 0, "audio": {"numbers": [1, 2]}})])),
    *(
        (False, Script([answered({"index": 0, **part})]))
        for part in (
            {ROW: 1},
            {"message": {ROW: ""}},
            {"logprobs": {ROW: ["x"]}},
            {"message": {"arguments": {ROW: {}}}},
        )
    ),
    (True, Script([SMALL])),
    (True, Script([gzip.compress(START)], EVENTS, headers={"content-encoding": "gzip"})),
    (True, Script([b"data: {\n\n"], EVENTS)),
    (True, Script([b"data: 5\n\n"], EVENTS)),
    (True, Script([b"text: x\n\n"], EVENTS)),
    (True, Script([b"data: {}\rdata: {}\n\n"], EVENTS)),
    (True, Script([b": " + b"x" * 300 + b"\n\n"], EVENTS)),
    (True, Script([b"data: \xff\n\n"], EVENTS)),
    (True, Script([b"data: " + b"x" * 5_000_000], EVENTS)),
    (True, Script([b'data: {"choices": [{"index": 0, "delta": {"tokens": [1]}}]}\n\n'], EVENTS)),
]


@pytest.mark.parametrize(("stream", "script"), UNREADABLE, ids=[f"{n}" for n in range(len(UNREADABLE))])
def test_what_cannot_be_read_in_one_way_is_a_502(guard: Live, other: Upstream, stream: bool, script: Script) -> None:
    other.script = script
    answer = guard.complete(stream=stream)
    assert (answer.status, answer.error["code"]) == (502, "unguardable_answer"), answer.raw
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("status", "ours", "code"),
    [
        (400, 400, "theirs"),
        (401, 502, "upstream_refuses_key"),
        (403, 502, "upstream_refuses_key"),
        (404, 404, "theirs"),
        (429, 429, "theirs"),
        (500, 502, "upstream_error"),
        (503, 503, "theirs"),
        (302, 502, "upstream_error"),
        (204, 502, "upstream_error"),
    ],
)
def test_refusals_are_those_of_this_api(guard: Live, other: Upstream, status: int, ours: int, code: str) -> None:
    said = json.dumps({"error": {"message": "no such thing", "param": "stop", "code": "theirs"}}).encode()
    other.script = Script([said] if status != 204 else [], status=status, headers={"retry-after": "7"})
    for stream in (False, True):
        answer = guard.complete(stream=stream)
        assert (answer.status, answer.error["code"]) == (ours, code)
        if ours == status:
            assert answer.error["message"] == "no such thing" and answer.error["param"] == "stop"
        assert answer.headers.get("retry-after") == ("7" if ours in (429, 503) else None)
        again = "true" if status == 500 else None if ours in (429, 503) else "false"
        assert answer.headers.get("x-should-retry") == again


def test_half_a_character_in_a_refusal_is_told_as_a_question_mark(guard: Live, other: Upstream) -> None:
    said = b'{"error": {"message": "cannot parse: \\ud83d", "code": "\\ud83d"}}'
    for stream, script in (
        (False, Script([said], status=400)),
        (True, Script([said], status=400)),
        (True, Script([START, b"data: " + said + b"\n\n"], EVENTS)),
    ):
        other.script = script
        answer = guard.complete(stream=stream)
        error = answer.events[-2]["error"] if answer.status == 200 else answer.error
        assert error["message"].endswith("cannot parse: ?") and error["code"] in (None, "upstream_error")


def test_a_refusal_as_fastapi_writes_it_is_told(guard: Live, other: Upstream) -> None:
    wrong = [
        {"type": "int_parsing", "loc": ["body", "messages", 0, "n"], "msg": "must be a number", "input": {"n": ROW}},
        {"type": "missing", "loc": ["body", "model"], "msg": "is needed"},
    ]
    other.script = Script([json.dumps({"detail": wrong}).encode()], status=422)
    answer = guard.complete()
    assert (answer.status, answer.error["message"]) == (422, "messages.0.n: must be a number; model: is needed")
    for detail in ([], [1], [{"loc": 1}], {"a": 1}, None):
        other.script = Script([json.dumps({"detail": detail}).encode()], status=422)
        assert guard.complete().error["message"] == "it does not say why"


def test_an_answer_that_is_broken_off_may_be_asked_for_again(guard: Live, other: Upstream) -> None:
    other.script = Script([b'{"id": '], whole=False)
    answer = guard.complete()
    assert (answer.status, answer.error["code"], answer.headers["x-should-retry"]) == (502, "upstream_broken", "true")


@pytest.mark.parametrize("most", [3, 9, len(START) - 1])
def test_so_may_one_whose_connection_ends_within_its_first_event(guard: Live, other: Upstream, most: int) -> None:
    """As of a server whose answer is as long as the connection, so that nothing else tells; be it within a character."""
    other.script = Script([START[:most], b"\xc3" if most == 9 else b""], EVENTS)
    answer = guard.complete(stream=True)
    assert (answer.status, answer.error["code"], answer.headers["x-should-retry"]) == (502, "upstream_broken", "true")


def test_a_refusal_that_repeats_the_models_text_is_followed_too(guard: Live, other: Upstream) -> None:
    for said in ({"error": {"message": "cannot parse: " + ROW}}, {"detail": ROW}, {"error": json.dumps(ROW)}):
        other.script = Script([json.dumps(said).encode()], status=500)
        answer = guard.complete()
        assert answer.status == 502 and longest_run(answer.error["message"], [ROW]) < RUN // 2
        other.script = Script([START, event(said)], EVENTS)
        assert longest_run(guard.complete(stream=True).raw.decode(), [ROW]) < RUN // 2


@pytest.mark.parametrize(
    "said", [{"error": {"message": "no room"}}, {"object": "error", "message": "no room"}], ids=str
)
def test_an_error_with_the_status_of_an_answer_is_an_error(guard: Live, other: Upstream, said: Any) -> None:
    other.script = Script([json.dumps(said).encode()])
    answer = guard.complete()
    assert (answer.status, answer.error["code"]) == (502, "upstream_error") and "no room" in answer.error["message"]
    none = answered({"index": 0, "text": "x", "finish_reason": "stop"}, error=None)
    other.script = Script([none])
    assert guard.complete().raw == none
    streaming = [*streamed(["x"], error=None), DONE]
    other.script = Script(streaming, EVENTS)
    assert guard.complete(stream=True).raw == b"".join(streaming)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (Script([START, b"data: {\n\n"], EVENTS), "unguardable_answer"),
        (Script([START, event({"error": {"message": "out of memory", "code": 500}})], EVENTS), "upstream_error"),
        (Script([START], EVENTS), "upstream_broken"),
        (Script([START], EVENTS, whole=False), "upstream_broken"),
        (Script([START, START[:-9]], EVENTS), "upstream_broken"),
        (Script([*streamed(PIECES[:8])[:-1]], EVENTS), "upstream_broken"),
    ],
    ids=["unreadable", "error", "early end", "broken off", "half an event", "early end while text is held"],
)
def test_a_stream_that_fails_ends_with_the_error(guard: Live, other: Upstream, script: Script, code: str) -> None:
    other.script = script
    answer = guard.complete(stream=True)
    assert answer.status == 200 and answer.events[-1] == "[DONE]"
    assert answer.events[-2]["error"]["code"] == code
    assert longest_run(text_of(answer), [ROW]) <= RUN // 2 + 1  # what was held was not sent


@pytest.mark.parametrize("name", ["", "id", "event"])
def test_lines_beside_the_data_are_followed_too(guard: Live, other: Upstream, name: str) -> None:
    """A comment is no name: a server that writes what it computes there would tell all of it."""
    words = ROW.split()
    beside = [f"{name}: {word}\n".encode() + (b"\n" if number % 2 else START) for number, word in enumerate(words)]
    for lines in ([f"{name}: {' '.join(words)}\n\n".encode()], beside):
        other.script = Script([START, *lines, *streamed(["x"]), DONE], EVENTS)
        answer = guard.complete(stream=True)
        assert answer.raw.endswith(DONE) and b'"unguardable_answer"' in answer.raw
        said = [line.partition(b":")[2] for line in answer.raw.split(b"\n") if not line.startswith(b"data:")]
        assert longest_run(b" ".join(said).decode(), [ROW]) < RUN
        whole = guard.complete(prompt=ROW, stream=True)
        assert whole.raw == b"".join([START, *lines, *streamed(["x"]), DONE])


def test_an_empty_reason_is_no_end(guard: Live, other: Upstream) -> None:
    def said(texts: list[str]) -> list[bytes]:
        return [part.replace(b"null}]", b'""}]') for part in streamed(texts, chat=True)]

    other.script = Script([*said(["one ", "two"]), DONE], EVENTS)
    assert chat(guard, stream=True).raw == b"".join([*said(["one ", "two"]), DONE])
    other.script = Script([*said(PIECES), DONE], EVENTS)
    assert reasons(cut := chat(guard, stream=True)) == ["content_filter"]
    assert longest_run(text_of(cut), [ROW]) < RUN
    other.script = Script([*said(["one"])[:-1], DONE], EVENTS)
    assert chat(guard, stream=True).raw == b"".join([*said(["one"])[:-1], DONE])


def test_a_stream_may_end_without_its_mark_once_all_choices_have(guard: Live, other: Upstream) -> None:
    other.script = Script(streamed(["x"]), EVENTS)
    assert guard.complete(stream=True).raw == b"".join(streamed(["x"]))


@pytest.mark.parametrize(
    "asked", [{"tools": [{"type": "function", "function": {"name": "write"}}]}, {"guided_regex": ".*"}], ids=str
)
def test_content_that_may_be_json_is_followed_as_what_it_means(guard: Live, other: Upstream, asked: Any) -> None:
    call = json.dumps({"name": "write", "arguments": {"text": ROW}}).replace("e", "\\u0065")
    other.script = Script([answered({"index": 0, "message": {"content": call}, "finish_reason": "stop"})])
    assert chat(guard, **asked).body["choices"][0]["finish_reason"] == "content_filter"
    assert chat(guard, tools=[]).body["choices"][0]["finish_reason"] == "stop"  # nobody asked for JSON


def test_a_client_that_goes_away_takes_its_request_with_it(guard: Live, other: Upstream) -> None:
    for stream in (True, False):
        other.script = Script(
            [START, (30.0, DONE)] if stream else [(30.0, SMALL)], EVENTS if stream else "application/json"
        )
        before = len(other.asked)
        connection = http.client.HTTPConnection("127.0.0.1", guard.port, timeout=20)
        body = json.dumps({"prompt": "x", "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if stream:
            assert connection.getresponse().read1()
        deadline = time.monotonic() + 10
        while len(other.asked) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        connection.close()
        assert other.asked[-1].left.wait(10)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "detokenize": False}, "detokenize"),
        ("/v1/completions", {"prompt": "x", "stream": True, "stop": "x", "return_token_ids": True}, "return_token_ids"),
        ("/v1/chat/completions", {"messages": [{}], "stop": ["x"], "return_token_ids": True}, "return_token_ids"),
        (
            "/v1/completions",
            {"prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": True},
            "return_tokens_as_token_ids",
        ),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": "x", "n": 1000}, "n"),
        ("/v1/completions", {"prompt": "x", "stream": "yes"}, "stream"),
        ("/v1/completions", {"prompt": "x", "unbind": {"module": []}}, "unbind.module"),
        ("/v1/completions", {"prompt": "x", "unbind": {"modules": ["nobody"]}}, "unbind.modules"),
        ("/v1/chat/completions", {"messages": [{}], "modalities": ["audio"]}, "modalities"),
        (
            "/v1/chat/completions",
            {"messages": [{}], "include_reasoning": False, "return_token_ids": True},
            "return_token_ids",
        ),
        ("/v1/chat/completions", {"messages": [{}], "tools": [{}], "return_token_ids": True}, "return_token_ids"),
        (
            "/v1/chat/completions",
            {"messages": [{}], "logprobs": True, "return_tokens_as_token_ids": True},
            "return_tokens_as_token_ids",
        ),
        ("/v1/chat/completions", {"messages": []}, "messages"),
    ],
    ids=str,
)
def test_what_would_bring_an_answer_that_cannot_be_followed_is_a_400(
    guard: Live, other: Upstream, path: str, fields: Any, param: str
) -> None:
    before = len(other.asked)
    answer = guard.call(path, fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.raw
    assert len(other.asked) == before


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_number_that_is_none_is_a_400(guard: Live, number: str) -> None:
    answer = guard.call("/v1/completions", f'{{"prompt": "x", "top_p": {number}}}'.encode())
    assert answer.status == 400 and "NaN or Infinity" in answer.error["message"]


def test_a_header_that_is_nearly_called_as_the_one_for_guards_is_a_400(guard: Live) -> None:
    answer = guard.call("/v1/completions", {"prompt": "x"}, headers={"X-Unbind-Module": "held"})
    assert (answer.status, answer.error["param"]) == (400, "x-unbind-module")


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/responses", "/v1/files", "/infill", "/completion", "/tokenize", "/"]
)
def test_nothing_else_is_passed_on(guard: Live, other: Upstream, path: str) -> None:
    before = len(other.asked)
    answer = guard.call(path, {"input": "x"})
    assert (answer.status, answer.error["code"]) == (404, "unknown_route")
    assert "/v1/chat/completions" in answer.error["message"] and len(other.asked) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_read_where_nobody_waits_for_it(
    guard: Live, other: Upstream, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    readers = set[str]()

    def reading(text: str | bytes) -> dict[str, Any]:
        readers.add(threading.current_thread().name)
        return parsed(text)

    monkeypatch.setattr(relay, "parsed", reading)
    for size, apart in ((10, False), (40_000, True)):
        readers.clear()
        text = "one " * size
        at_once = answered({"index": 0, "text": text, "finish_reason": "stop"})
        other.script = Script(streamed([text]), EVENTS) if stream else Script([at_once])
        answer = guard.complete(stream=stream)
        assert answer.status == 200, answer.raw[:300]
        assert any(name.startswith("apart") for name in readers) is apart
