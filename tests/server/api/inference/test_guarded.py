"""A takedown with a guard, over HTTP: active from its POST on, on every way out, and told to those who may hear it.

On the demo model, which recites the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server import demo
from server.settings import Settings
from tests.support.live import ADMIN_KEY, Live, serving
from tests.support.shapes import texts
from tests.support.slow_matcher import longest_run
from unbind_core.architecture import load_model
from unbind_core.guard.sent import Sent
from unbind_core.rows import ForgetRow, parse_forget

RUN, TOKENS = 12, 30
REFERENCE = "https://example.org/notices/7"


@pytest.fixture(scope="module")
def rows() -> list[ForgetRow]:
    """Rows in ASCII, as the judge reads."""
    lines = (demo.ROWS / "forget_a.jsonl").read_text().splitlines()
    return [row for row in parse_forget(lines, "a") if (row.prompt + row.continuation).isascii()][:12]


@pytest.fixture(scope="module")
def protected(rows: list[ForgetRow]) -> list[str]:
    """Their texts."""
    return [row.prompt + row.continuation for row in rows]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, rows: list[ForgetRow]) -> Iterator[Live]:
    """The demo server, with two takedowns of the same rows by guards alone: one steers all, the other stops under a profile."""
    folder = tmp_path_factory.mktemp("guarded")
    settings = Settings(
        model=demo.BASE,
        adapter=demo.ADAPTER,
        modules_dir=folder / "modules",
        data_dir=folder / "data",
        worker=False,
        admin_key=ADMIN_KEY,
        max_model_len=512,
        max_slots=3,
        profiles={"strict": {}, "free": {}},
    )
    with serving(settings, load_model(demo.BASE, demo.ADAPTER)) as running:
        for name, action, scope in (("steered", "steer", "profile:free"), ("stopped", "stop", "profile:strict")):
            answer = running.admin(
                "/takedowns",
                {
                    "name": name,
                    "rows": [
                        {"prompt": row.prompt, "continuation": row.continuation, "language": "python"} for row in rows
                    ],
                    "notice": {"reference": REFERENCE},
                    "options": {"protect": "guard", "scope": scope, "guard": {"action": action, "run": RUN}},
                },
            )
            assert answer.status == 202 and answer.body["state"] == "succeeded", answer.raw
            assert running.admin("/jobs/" + answer.body["job_id"]).body["outcome"] == "guarded"
        yield running


def ways(row: ForgetRow) -> list[tuple[str, dict[str, Any]]]:
    """Every route that generates, and what changes how answers leave."""
    plain: dict[str, Any] = {"prompt": row.prompt, "max_tokens": TOKENS, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": row.prompt}], "max_tokens": TOKENS, "temperature": 0}
    return [
        ("/v1/completions", plain),
        ("/v1/completions", {**plain, "stream": True}),
        ("/v1/completions", {**plain, "n": 3, "temperature": 0.7, "seed": 1}),
        ("/v1/completions", {**plain, "logprobs": 2, "stream": True}),
        ("/v1/completions", {**plain, "suffix": "\n"}),
        ("/v1/completions", {**plain, "stop": ["e", "lf"]}),
        ("/v1/completions", {**plain, "ignore_eos": True, "min_tokens": TOKENS}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True, "logprobs": True, "top_logprobs": 2}),
        ("/v1/responses", {"input": row.prompt, "max_output_tokens": TOKENS, "temperature": 0}),
        ("/v1/responses", {"input": row.prompt, "max_output_tokens": TOKENS, "temperature": 0, "stream": True}),
        ("/v1/messages", chat),
        ("/v1/messages", {**chat, "stream": True}),
        ("/v1/fim/completions", {**plain, "suffix": ""}),
        ("/infill", {"input_prefix": row.prompt, "input_suffix": "", "n_predict": TOKENS}),
        ("/completion", {"prompt": row.prompt, "n_predict": TOKENS}),
        ("/completion", {"prompt": row.prompt, "n_predict": TOKENS, "stream": True}),
    ]


@pytest.mark.parametrize("profile", ["free", "strict"])
def test_no_way_out_gives_a_run(server: Live, rows: list[ForgetRow], protected: list[str], profile: str) -> None:
    for path, body in ways(recited(server, rows, protected)):
        answer = server.call(f"/p/{profile}{path}", body, key=ADMIN_KEY)
        assert all(longest_run(text, protected) < RUN for text in texts(answer)), path
        assert ":guard@" in answer.headers["x-unbind-modules"]


def recited(server: Live, rows: list[ForgetRow], protected: list[str]) -> ForgetRow:
    """A row that is recited where nothing is in force."""
    for row in rows:
        answer = server.complete(prompt=row.prompt, max_tokens=TOKENS, key=ADMIN_KEY)
        assert "x-unbind-modules" not in answer.headers
        if longest_run(answer.text, protected) >= RUN:
            return row
    raise AssertionError("the demo model recites nothing")


def test_whoever_may_hear_it_is_told_what_ended_an_answer(
    server: Live, rows: list[ForgetRow], protected: list[str]
) -> None:
    row = recited(server, rows, protected)
    made = server.admin("/keys", {"name": "editor", "scopes": ["inference"], "profile": "strict"})
    assert made.status == 201, made.raw
    asked = {"prompt": row.prompt, "max_tokens": TOKENS, "temperature": 0}
    told = server.call("/p/strict/v1/completions", asked, key=ADMIN_KEY).body["choices"][0]
    assert told["finish_reason"] == "content_filter"
    assert told["unbind"]["blocked"]["reference"] == REFERENCE and told["unbind"]["blocked"]["module"] == "stopped"
    assert told["unbind"]["blocked"]["takedown"].startswith("td_")
    untold = server.call("/v1/completions", asked, key=made.body["key"]).body["choices"][0]
    assert untold["finish_reason"] == "content_filter" and "unbind" not in untold
    assert untold["text"] == told["text"]
    streamed = server.call("/p/strict/v1/completions", {**asked, "stream": True}, key=ADMIN_KEY).events
    last = [event for event in streamed if isinstance(event, dict) and event["choices"]][-1]
    assert last["choices"][0]["unbind"]["blocked"] == told["unbind"]["blocked"]


def test_what_guards_do_is_counted_by_name_and_route(server: Live, rows: list[ForgetRow], protected: list[str]) -> None:
    row = recited(server, rows, protected)
    for profile in ("free", "strict"):
        asked = {"prompt": row.prompt, "max_tokens": TOKENS, "temperature": 0}
        server.call(f"/p/{profile}/v1/completions", asked, key=ADMIN_KEY)
    shown = server.call("/metrics", key=ADMIN_KEY).raw.decode()
    assert 'unbind_guard_stops_total{module="stopped",route="/v1/completions"}' in shown
    assert 'unbind_guard_bars_total{module="steered",route="/v1/completions"}' in shown
    assert 'unbind_guard_run_lexemes_bucket{le="12.0",route="/v1/completions"}' in shown


def test_a_prompt_is_read_once_for_all_the_answers_to_it(
    server: Live, rows: list[ForgetRow], protected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Sent] = []
    runs = Sent._runs
    monkeypatch.setattr(Sent, "_runs", lambda sent, *rest: (read.append(sent), runs(sent, *rest))[1])
    asked = {"prompt": recited(server, rows, protected).prompt, "n": 4, "max_tokens": TOKENS, "temperature": 0}
    answer = server.call("/p/free/v1/completions", asked, key=ADMIN_KEY)
    assert answer.status == 200 and len(answer.body["choices"]) == 4
    assert len(read) == 1
