"""Bodies that nobody should send: refused by the name of what is wrong, never a 5xx, never a hang."""

from __future__ import annotations

import copy
import http.client
import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from server.bench.fuzz_words import BROKEN, HOSTILE, NAMES
from server.registry.audit import Actor
from tests.support.live import ADMIN_KEY, Live, live

SECONDS = 20.0  # a single answer may take this long; all are over in a fraction of it

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "tiny",
        "prompt": "def a(",
        "suffix": "\n",
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "n": 1,
        "best_of": 1,
        "seed": 1,
        "stop": ["x"],
        "stream": True,
        "echo": False,
        "logprobs": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1},
        "stream_options": {"include_usage": True},
        "unbind": {"modules": ["one"], "report": True},
        "ignore_eos": False,
        "n_predict": 2,
        "options": {"num_predict": 2},
    },
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 2,
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": 1,
        "stream": True,
        "unbind": {"modules": {"one": 1}},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "continue_final_message": True,
    },
    "/v1/responses": {
        "model": "tiny",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "instructions": "a",
        "max_output_tokens": 2,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "text": {"format": {"type": "text"}},
        "tools": [],
        "tool_choice": "auto",
        "metadata": {"a": "b"},
        "stream": True,
        "unbind": {"modules": {"one": 1}, "report": True},
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
        ],
        "stop_sequences": ["x"],
        "tools": [],
        "tool_choice": {"type": "auto"},
        "output_config": {"effort": "low"},
        "stream": True,
        "unbind": {"modules": ["one"]},
    },
    "/v1/responses/input_tokens": {"input": "hi", "instructions": "a"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}], "system": "a"},
    "/v1/fim/completions": {"prompt": "a", "suffix": "b", "max_tokens": 2, "stream": False},
    "/infill": {
        "input_prefix": "a",
        "input_suffix": "b",
        "input_extra": [{"filename": "x", "text": "y"}],
        "prompt": "c",
        "n_predict": 2,
        "n_cmpl": 1,
        "response_fields": ["content", "timings/prompt_n"],
        "cache_prompt": True,
    },
    "/completion": {"prompt": "a", "n_predict": 2, "n_cmpl": 1, "n_probs": 0, "repeat_penalty": 1.1, "seed": -1},
    "/apply-template": {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False},
    "/tokenize": {"content": "a", "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [5, 6]},
    "/admin/v1/keys": {
        "name": "a",
        "scopes": ["report"],
        "enforced": {"one": 1},
        "allowed": ["one"],
        "burst": 1,
        "requests_per_minute": 9,
    },
    "/admin/v1/policies/global": {"modules": [], "enforced": [], "shadow": ["one"], "allowed": None},
}


@pytest.fixture(scope="module")
def target(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose answers are short."""
    with live(checkpoint, tmp_path_factory.mktemp("fuzz"), max_model_len=48, max_slots=4) as running:
        yield running


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body with one to three things wrong, or raw bytes that are no body at all."""
    path = rng.choice(tuple(VALID))
    if rng.random() < 0.1:
        return path, rng.choice(BROKEN)
    body = json.loads(json.dumps(VALID[path]))
    for _ in range(rng.randrange(1, 4)):
        place: Any = body
        while isinstance(place, dict) and place:
            key = rng.choice(tuple(place))
            inner = place[key]
            if isinstance(inner, dict) and inner and rng.random() < 0.5:
                place = inner
                continue
            if isinstance(inner, list) and inner and isinstance(inner[0], dict) and rng.random() < 0.5:
                place = inner[0]
                continue
            match rng.randrange(6):
                case 0:
                    del place[key]
                case 1:
                    place[rng.choice(("x", "", "é", "modules", "__class__"))] = copy.deepcopy(rng.choice(HOSTILE))
                case _:
                    place[key] = copy.deepcopy(rng.choice(HOSTILE))
            break
    raw = json.dumps(body).encode()
    if rng.random() < 0.05:
        at = rng.randrange(len(raw))
        raw = raw[:at] + rng.randbytes(3) + raw[at + rng.randrange(4) :]
    return path, raw


def fuzz(server: Live, count: int, seed: int) -> None:
    """Send ``count`` bodies over one connection; every answer is whole, in time, and says what is wrong."""
    rng = random.Random(seed)
    statuses: dict[int, int] = {}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)) as connection:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
        for _ in range(count):
            path, raw = mutated(rng)
            method = "PUT" if path.startswith("/admin/v1/policies") else "POST"
            names = rng.choice(NAMES)
            connection.request(method, path, raw, {**headers, "X-Unbind-Modules": names})
            answer = connection.getresponse()
            body = answer.read()
            shown = (path, raw[:300], names[:20], answer.status, body[:300])
            assert answer.status in (200, 201) or 400 <= answer.status < 500, shown
            if answer.status >= 400:
                error = json.loads(body)["error"]
                assert error.keys() == {"message", "type", "param", "code"} and error["message"], shown
                assert error["param"] or error["code"] or answer.status != 400 or "body" in error["message"], shown
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            if path == "/admin/v1/policies/global" and answer.status == 200:
                # an enforced name that is nowhere would answer everything with 503
                server.service.access.delete_rules("global", Actor("test"), 0.0)
    assert statuses[200] > count * 0.05 and statuses[400] > count * 0.3, statuses
    stats = server.service.engine.stats()
    assert stats.failures == 0 and server.complete(max_tokens=1, key=ADMIN_KEY).status == 200


def test_bad_bodies_are_refused_by_name(target: Live) -> None:
    fuzz(target, 500, seed=0)


@pytest.mark.slow
def test_ten_thousand_bad_bodies_are_refused_by_name(target: Live) -> None:
    fuzz(target, 10_000, seed=1)


def explore(server: Live, examples: int) -> None:
    """Requests made from the service's own description, valid and not, for every operation; refusals are as it says."""
    administrator = {"Authorization": f"Bearer {ADMIN_KEY}"}
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=administrator)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 15
    described = server.call("/openapi.json", key=ADMIN_KEY).body
    refusals = {}
    for operation in operations:
        told = described["paths"][operation.path][operation.method]["responses"]
        assert "422" not in told
        refusal = told["default"]["content"]["application/json"]["schema"]
        validator = jsonschema_rs.validator_for({**refusal, "components": described["components"]})
        refusals[operation.label] = validator
    for operation in operations:
        # what fails is reported as it is: making it smaller would take minutes
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            answer = case.call(headers=administrator, timeout=SECONDS)
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            assert answer.status_code < 400 or refusals[case.operation.label].is_valid(answer.json()), (
                case.as_curl_command(),
                answer.text,
            )
            told = case.operation.definition.raw["responses"]
            kinds = told.get(str(answer.status_code), told["default"])["content"]
            assert answer.headers["content-type"][0].partition(";")[0] in kinds, case.as_curl_command()
            server.service.access.delete_rules("global", Actor("test"), 0.0)

        check()


def test_nothing_in_the_service_s_description_leads_to_a_5xx(target: Live) -> None:
    explore(target, 5)


@pytest.mark.slow
def test_nothing_in_the_service_s_description_leads_to_a_5xx_at_length(target: Live) -> None:
    explore(target, 20)
