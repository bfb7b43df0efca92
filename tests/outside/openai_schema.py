"""Answers of a live server, held against OpenAI's own description of its API; docs/clients.md says how it is run.

    python tests/outside/openai_schema.py http://127.0.0.1:8000 openapi.json

Prints what does not fit, and ends with 1 where anything does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
from jsonschema import Draft202012Validator

ASKED = {"model": "unbind-demo", "temperature": 0}
CHAT = {**ASKED, "messages": [{"role": "user", "content": "def main("}], "max_tokens": 12}
TEXT = {**ASKED, "prompt": "def main(", "max_tokens": 12}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON_CHAT = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA, "strict": True}}
JSON_RESPONSE = {"format": {"type": "json_schema", "name": "one", "schema": SCHEMA, "strict": True}}
RESPONSE = {**ASKED, "input": "def main(", "max_output_tokens": 16}

# (path, body, the schema of an answer, the schema of an event of a stream)
POSTS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    *(
        ("/completions", TEXT | more, "CreateCompletionResponse", "CreateCompletionResponse")
        for more in (
            {},
            {"n": 2, "temperature": 1},
            {"logprobs": 2},
            {"logprobs": 0, "echo": True},
            {"prompt": ["def main(", "class A"], "stop": ["\n"]},
            {"suffix": "    return 1\n"},
            {"echo": True, "max_tokens": 0},
            {"seed": 3, "user": "me", "presence_penalty": 0.5, "logit_bias": {"5": 1}},
        )
    ),
    *(
        ("/chat/completions", CHAT | more, "CreateChatCompletionResponse", "CreateChatCompletionStreamResponse")
        for more in (
            {},
            {"n": 2, "temperature": 1},
            {"logprobs": True, "top_logprobs": 2},
            {"response_format": {"type": "json_object"}},
            {"response_format": JSON_CHAT, "max_tokens": 60},
            {"stop": "\n", "max_completion_tokens": 8},
            {"store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
        )
    ),
    *(
        ("/responses", RESPONSE | more, "Response", "ResponseStreamEvent")
        for more in (
            {},
            {"instructions": "Write code.", "max_output_tokens": 40},
            {"text": JSON_RESPONSE, "max_output_tokens": 60},
            {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
            {"metadata": {"a": "b"}, "store": False, "truncation": "disabled", "user": "me"},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "def main("}]}]},
        )
    ),
)
USAGE = {"stream_options": {"include_usage": True}}

# Null in the answers of OpenAI's own servers, which the description leaves out.
NULLS = {
    ("CreateCompletionResponse", "finish_reason"),  # in chunks before the last
    ("CreateCompletionResponse", "usage"),
    ("CreateCompletionResponse", "token_logprobs.0"),  # the first log-probability of an echoed prompt
    ("ResponseStreamEvent", "usage"),  # of a response that has just begun
}


class Description:
    """OpenAI's document, whose schemas refer to each other."""

    def __init__(self, path: Path) -> None:
        self._whole = json.loads(path.read_text(encoding="utf-8"))
        _may_be_null(self._whole["components"]["schemas"])

    def problems(self, value: Any, schema: str) -> Iterator[str]:
        """What of a value does not fit the schema of that name: the innermost reason of each."""
        asked = {**self._whole, "$ref": f"#/components/schemas/{schema}"}
        for error in Draft202012Validator(asked).iter_errors(value):
            while error.context:
                error = max(error.context, key=lambda one: len(one.absolute_path))
            where = ".".join(map(str, error.absolute_path)) or "itself"
            if error.instance is None and any(schema == one and where.endswith(end) for one, end in NULLS):
                continue
            yield f"{schema}: {where}: {error.message[:200]}"


def _may_be_null(part: Any) -> None:
    """``nullable`` is the word of an older OpenAPI, which JSON Schema passes over."""
    for value in list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else ():
        _may_be_null(value)
    if isinstance(part, dict) and part.pop("nullable", None) is True:
        inner = dict(part)
        part.clear()
        part["anyOf"] = [inner, {"type": "null"}]


def events(text: str) -> Iterator[Any]:
    """What a stream's ``data`` lines hold, but for the mark of its end."""
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def found(client: httpx.Client, told: Description) -> Iterator[tuple[str, str]]:
    """(request, what does not fit), for everything above and for the lists of models."""
    for path, schema in (("/models", "ListModelsResponse"), ("/models/unbind-demo", "Model")):
        yield from ((f"GET {path}", one) for one in told.problems(client.get(path).json(), schema))
    for path, body, whole, part in POSTS:
        for stream in (False, True):
            streamed = {"stream": True, **({} if path == "/responses" else USAGE)} if stream else {}
            answer = client.post(path, json=body | streamed)
            named = f"POST {path} {json.dumps(body | streamed)}"
            if answer.status_code != 200:
                yield named, f"{answer.status_code} {answer.text[:200]}"
                continue
            for value in events(answer.text) if stream else [answer.json()]:
                yield from ((named, one) for one in told.problems(value, part if stream else whole))
    for path in ("/completions", "/chat/completions", "/responses"):
        answer = client.post(path, json={"temperature": "hot"})
        yield from ((f"POST {path}, refused", one) for one in told.problems(answer.json(), "ErrorResponse"))


def main() -> None:
    """Print each problem once, with the first request that showed it and how many did."""
    url, path = sys.argv[1:]
    seen: dict[str, list[str]] = {}
    with httpx.Client(base_url=f"{url}/v1", timeout=120) as client:
        for request, problem in found(client, Description(Path(path))):
            seen.setdefault(problem, []).append(request)
    for problem, requests in seen.items():
        print(f"{problem}\n    {len(requests)} times, first by {requests[0][:300]}")
    print(f"{len(seen)} problems")
    sys.exit(bool(seen))


if __name__ == "__main__":
    main()
