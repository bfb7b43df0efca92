"""llama.cpp's own routes: their shapes, and the same modules as everywhere else."""

from __future__ import annotations

import pytest

from tests.support.live import ADMIN_KEY, Live
from unbind_core.encoding import encode

PROMPT = "def add(first, second):\n"
MESSAGES = [{"role": "user", "content": "hello"}]


def test_a_completion_in_its_shape_says_what_every_other_says(server: Live) -> None:
    plain = server.complete().text
    for path in ("/completion", "/completions"):
        made = server.call(path, {"prompt": PROMPT, "n_predict": 12}).body
        assert made["content"] == plain and made["stop"] is True and made["stop_type"] == "limit"
        assert made["tokens_predicted"] == 12
    streamed = server.call("/completion", {"prompt": PROMPT, "n_predict": 12, "stream": True}).events
    assert "".join(event["content"] for event in streamed) == plain and streamed[-1]["stop"] is True
    several = server.call("/completion", {"prompt": [PROMPT, "class", [9, 10]], "n_predict": 3})
    assert several.status == 400 and several.error["param"] == "prompt"
    both = server.call("/completion", {"prompt": [PROMPT, "class"], "n_predict": 12}).body
    assert [answer["index"] for answer in both] == [0, 1] and both[0]["content"] == plain


@pytest.mark.parametrize("path", ["/completion", "/completions", "/chat/completions"])
def test_modules_apply_there_as_everywhere(server: Live, path: str) -> None:
    body = {"prompt": PROMPT, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}

    def text(prefix: str = "", **fields: object) -> tuple[str, list[str]]:
        answer = server.call(prefix + path, {**body, **fields})
        assert answer.status == 200, answer.raw
        applied = answer.headers.get("x-unbind-modules", "")
        made = answer.body
        said = made["content"] if "content" in made else made["choices"][0]["message"]["content"]
        return said, sorted(label.split("@")[0] for label in applied.split(",") if label)

    plain, none = text()
    assert none == []
    named, applied = text(unbind={"modules": {"one": 0.5}})
    assert applied == ["one"] and named != plain
    assert text("/p/safe") == (named, ["one"])
    assert text("/p/strict")[1] == ["one", "two"] and text("/p/strict")[0] != plain
    off = server.call(f"/p/strict{path}", {**body, "unbind": {"modules": ["-two"]}})
    assert (off.status, off.error["code"]) == (403, "module_enforced")
    server.admin("/policies/global", {"enforced": ["two"]}, "PUT")
    assert text()[1] == ["two"] and text()[0] != plain
    server.admin("/policies/global", {}, "PUT")
    missing = server.call(path, {**body, "model": "other"})
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    assert text(model="") == (plain, [])


def test_several_greedy_answers_are_one_greedy_and_others_sampled(server: Live) -> None:
    infill = {"input_prefix": PROMPT, "input_suffix": "\n    return third\n", "n_predict": 12, "seed": 4}
    greedy = server.call("/infill", infill).body["content"]
    for fields in ({"n_cmpl": 3}, {"n_cmpl": 3, "temperature": 0}):
        made = [answer["content"] for answer in server.call("/infill", {**infill, **fields}).body]
        assert made[0] == greedy and len(set(made)) == 3
        again = [answer["content"] for answer in server.call("/infill", {**infill, **fields}).body]
        assert again == made
    hot = server.call("/completion", {"prompt": [PROMPT, PROMPT], "n_predict": 12, "n_cmpl": 2, "seed": 4}).body
    assert hot[0]["content"] == hot[2]["content"] == server.complete().text
    assert hot[0]["content"] not in (hot[1]["content"], hot[3]["content"])
    same = [choice["text"] for choice in server.complete(n=3).body["choices"]]
    assert len(set(same)) == 1  # there, temperature 0 means greedy for each of n


def test_seed_minus_one_is_no_seed(server: Live) -> None:
    body = {"prompt": PROMPT, "n_predict": 12, "temperature": 3.0, "seed": -1}
    assert len({server.call("/completion", body).body["content"] for _ in range(4)}) > 1


def test_the_template_and_the_properties_are_told(server: Live) -> None:
    text = server.call("/p/safe/apply-template", {"messages": MESSAGES}).body
    assert text == {"prompt": "# user\nhello\n# assistant\n"}
    tokens = server.call("/tokenize", {"messages": MESSAGES}).body["tokens"]
    assert tokens == encode(server.service.loaded.tokenizer, text["prompt"])
    props = server.call("/p/safe/props").body
    assert props["default_generation_settings"]["n_ctx"] == 256 and props["total_slots"] == 4
    assert props["model_alias"] == "tiny" and props["chat_template"] == server.service.loaded.tokenizer.chat_template
    assert server.call("/models").body == server.call("/v1/models").body
    assert server.call("/p/safe/models").status == 200


def test_a_key_is_needed_there_once_there_is_one(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.caller.keys_needed", lambda _: True)
    bodies = {
        "/completion": {"prompt": "a"},
        "/apply-template": {"messages": MESSAGES},
        "/props": None,
        "/models": None,
    }
    for path, body in bodies.items():
        assert server.call(path, body).status == 401, path
        assert server.call(path, {**body, "max_tokens": 1} if body else None, key=ADMIN_KEY).status == 200, path


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/v1/models", "/v1/models/tiny"])
def test_who_asks_whether_it_is_up_may_do_so_by_a_head(server: Live, path: str) -> None:
    answer = server.call(path, method="HEAD", key=ADMIN_KEY)
    assert answer.status == 200 and answer.raw == b""
    assert answer.headers["content-length"] == server.call(path, method="GET", key=ADMIN_KEY).headers["content-length"]
    assert server.call(path, method="HEAD").status == server.call(path).status


@pytest.mark.parametrize("path", ["/completion", "/infill"])
def test_a_stream_tells_every_token_also_where_it_adds_no_text(server: Live, path: str) -> None:
    half = server.call("/tokenize", {"content": "\U0001f600"}).body["tokens"][0]
    given = {"prompt": "a", "input_prefix": "a", "input_suffix": "b", "n_predict": 5, "temperature": 1.0, "seed": 3}
    for fields in ({"logit_bias": {str(half): 5}}, {"stop_token_ids": [half], "logit_bias": {str(half): 100}}, {}):
        whole = server.call(path, {**given, **fields}).body
        events = server.call(path, {**given, **fields, "stream": True}).events
        assert [token for event in events for token in event["tokens"]] == whole["tokens"], fields
        assert "".join(event["content"] for event in events) == whole["content"]
        assert events[-1]["stop"] and len(whole["tokens"]) == whole["tokens_predicted"]
