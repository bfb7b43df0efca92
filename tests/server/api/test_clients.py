"""What editors send, as their sources have it, and what each of them needs to find in the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import TOOL_TEMPLATE, Answer, Live, live
from tests.support.repository import ROOT

FOLDER = Path(__file__).parent / "clients"
RECORDED = [
    pytest.param(request, id=f"{path.stem}-{number}")
    for path in sorted(FOLDER.glob("*.json"))
    for number, request in enumerate(json.loads(path.read_text(encoding="utf-8")))
]
TIMINGS = ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model whose template takes tools, as agents send them."""
    folder = tmp_path_factory.mktemp("clients")
    with live(
        checkpoint, folder, template=TOOL_TEMPLATE, max_model_len=512, profiles={"safe": {"modules": {"one": 0.5}}}
    ) as running:
        yield running


def chunks(answer: Answer) -> list[Any]:
    """The chunks of a stream, which ends as the protocol wants it."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.raw
    assert answer.raw.endswith(b"\n\n") and answer.events[-1] == "[DONE]" and answer.events.count("[DONE]") == 1
    return answer.events[:-1]


def stream_of_text(answer: Answer) -> None:
    """``choices[0].text``."""
    made = chunks(answer)
    assert all(isinstance(chunk["choices"][0]["text"], str) for chunk in made)
    assert made[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert not any("usage" in chunk for chunk in made)


def stream_of_twelve_tokens(answer: Answer) -> None:
    """``options.num_predict`` is a length too."""
    stream_of_text(answer)
    assert len(chunks(answer)) <= 12


def stream_that_ends_once(answer: Answer) -> None:
    """The reader stops at the first finish_reason, so there is one, in the last chunk."""
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks(answer)]
    assert reasons[-1] is not None and not any(reasons[:-1])


def stream_of_delta_content(answer: Answer) -> None:
    """``choices[0].delta.content`` of every chunk, unguarded."""
    assert all(isinstance(chunk["choices"][0]["delta"]["content"], str) for chunk in chunks(answer))


def stream_of_deltas_with_usage(answer: Answer) -> None:
    """A role, text, a reason, then the usage chunk that was asked for."""
    first, *middle, last = chunks(answer)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert all(isinstance(chunk["choices"][0]["delta"].get("content", ""), str) for chunk in middle)
    assert last["choices"] == [] and last["usage"]["total_tokens"] >= last["usage"]["completion_tokens"]


def whole_completion(answer: Answer) -> None:
    """Fields that a strict reader requires."""
    made = answer.body
    assert {"id", "object", "created", "model", "choices", "usage"} <= made.keys()
    assert all(type(made["usage"][name]) is int for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
    assert made["choices"][0]["finish_reason"] in ("stop", "length") and isinstance(made["choices"][0]["text"], str)


def events_of_a_response(answer: Answer) -> None:
    """Named events, numbered, in one order; the last has the whole response. No ``[DONE]``."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.raw
    made = answer.events
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    assert made[0]["type"] == "response.created" and made[-1]["type"] in ("response.completed", "response.incomplete")
    assert made[-1]["response"]["output"] and made[-1]["response"]["usage"]["total_tokens"] > 0
    names = re.findall(rb"^event: (.+)$", answer.raw, re.MULTILINE)
    assert [name.decode() for name in names] == [event["type"] for event in made]


def events_of_a_message(answer: Answer) -> None:
    """Named events; blocks begin and end; usage at both ends."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.raw
    made = answer.events
    kinds = [event["type"] for event in made]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") >= 1
    assert "input_tokens" in made[0]["message"]["usage"] and made[-2]["usage"]["output_tokens"] > 0


def a_response(answer: Answer) -> None:
    """Items with text."""
    assert answer.body["object"] == "response" and answer.body["status"] in ("completed", "incomplete")
    assert answer.body["output"][0]["content"][0]["type"] == "output_text"


def a_message(answer: Answer) -> None:
    """Blocks with text."""
    assert answer.body["type"] == "message" and answer.body["content"][0]["type"] == "text"
    assert answer.body["stop_reason"] in ("end_turn", "max_tokens")


def scores_of_prompts(answer: Answer) -> None:
    """A score for every token of each prompt and for the one that was made, which the reader drops."""
    assert answer.status == 200, answer.raw
    for choice in answer.body["choices"]:
        scores, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert scores[0] is None and len(scores) == len(top) == len(choice["logprobs"]["tokens"]) in (4, 5)


def infill(answer: Answer) -> None:
    """``content`` and what the status line shows."""
    check_infill(answer.body)


def three_infills(answer: Answer) -> None:
    """An array where several were asked for."""
    assert len(answer.body) == 3
    for made in answer.body:
        check_infill(made)


def check_infill(made: dict[str, Any]) -> None:
    """One answer in llama.cpp's shape."""
    assert isinstance(made["content"], str) and type(made["tokens_cached"]) is int and made["truncated"] is False
    assert all(isinstance(made["timings"][name], (int, float)) for name in TIMINGS)


def warm_up(answer: Answer) -> None:
    """Nothing is made."""
    assert answer.status == 200 and answer.body["content"] == "" and answer.body["tokens_predicted"] == 0


def content_by_pattern(answer: Answer) -> None:
    """A pattern over the raw body, and keys with slashes."""
    assert re.search(rb'"content"\s*:\s*"', answer.raw)
    assert {"content", "truncated", "tokens_cached", *(f"timings/{name}" for name in TIMINGS)} <= answer.body.keys()


def anything(answer: Answer) -> None:
    """The answer is thrown away."""
    assert answer.status == 200


def models(answer: Answer) -> None:
    """A list with ids."""
    assert "tiny" in [model["id"] for model in answer.body["data"]]


def health(answer: Answer) -> None:
    """Alive."""
    assert answer.body == {"status": "ok"}


READERS: dict[str, Callable[[Answer], None]] = {
    reader.__name__.replace("_", " ").replace("warm up", "warm-up"): reader
    for reader in (
        stream_of_text,
        stream_of_twelve_tokens,
        stream_that_ends_once,
        stream_of_delta_content,
        stream_of_deltas_with_usage,
        whole_completion,
        events_of_a_response,
        events_of_a_message,
        a_response,
        a_message,
        scores_of_prompts,
        infill,
        three_infills,
        warm_up,
        content_by_pattern,
        anything,
        models,
        health,
    )
}


@pytest.mark.parametrize("request_", RECORDED)
@pytest.mark.parametrize("prefix", ["", "/p/safe"])
def test_a_recorded_request_is_answered_as_its_client_needs(
    server: Live, prefix: str, request_: dict[str, Any]
) -> None:
    def ask(_: int = 0) -> Answer:
        return server.call(prefix + request_["path"], request_.get("body"), headers=request_.get("headers"))

    if request_["reads"] == "three streams at once":
        with ThreadPoolExecutor(3) as pool:
            for answer in pool.map(ask, range(3)):
                stream_of_text(answer)
        return
    answer = ask()
    READERS[request_["reads"]](answer)
    if prefix and "body" in request_:
        assert "one@" in answer.headers["x-unbind-modules"]


def test_every_client_is_there() -> None:
    editors = {"continue", "zed", "llama-vscode", "llama-vim", "minuet", "codecompanion", "twinny", "tabby", "cline"}
    agents = {"vscode", "kilo", "jetbrains", "codex", "opencode", "claude-code"}
    assert {path.stem for path in FOLDER.glob("*.json")} == editors | agents | {"litellm", "lm-evaluation-harness"}


def test_every_recipe_is_replayed_at_the_address_that_it_names() -> None:
    sections = (ROOT / "docs/editors.md").read_text(encoding="utf-8").split("\n## ")[1:]
    stems = {"JetBrains AI Assistant": "jetbrains", "VS Code": "vscode"}
    replayed = set()
    for section in sections:
        title = section.partition("\n")[0]
        if title in ("Other projects' suites", "Anything else"):
            continue
        stem = stems.get(title, title.lower().replace(".", "-").replace(" ", "-"))
        addresses = set(re.findall(r"http://127\.0\.0\.1:8000(?:/p/team)?([a-z0-9/-]*)", section))
        for request in json.loads((FOLDER / f"{stem}.json").read_text(encoding="utf-8")):
            assert any(request["path"].startswith(address) for address in addresses), (title, request["path"])
        replayed.add(stem)
    assert replayed == {path.stem for path in FOLDER.glob("*.json")} - {"cline", "llama-vim", "twinny"}
