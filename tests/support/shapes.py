"""What an answer says, whatever the API's shape: text by choice, with the arguments of the calls in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.support.live import Answer


def texts(answer: Answer) -> list[str]:
    """All that a client would show or run, by choice, of a whole answer or a stream."""
    assert answer.status == 200, answer.raw
    streamed = "event-stream" in answer.headers["content-type"]
    found: dict[int, str] = defaultdict(str)
    for body in answer.events if streamed else [answer.body]:
        for one in body if isinstance(body, list) else [body]:
            for index, text in _parts(one) if isinstance(one, dict) else ():
                found[index] += text
    return list(found.values())


def _parts(body: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Each choice with a part of what it says."""
    if "choices" in body:
        for choice in body["choices"]:
            part = choice.get("delta") or choice.get("message") or choice
            calls = (call["function"].get("arguments") or "" for call in part.get("tool_calls") or ())
            yield choice["index"], (part.get("text") or part.get("content") or "") + "".join(calls)
    elif body.get("object") == "response":
        for item in body["output"]:
            yield 0, "".join(part["text"] for part in item.get("content", ())) + item.get("arguments", "")
    elif body.get("type") == "message":
        for block in body["content"]:
            yield 0, block.get("text") or str(block.get("input") or "")
    elif "type" in body:
        delta = body.get("delta")
        if isinstance(delta, dict):
            delta = delta.get("text") or delta.get("partial_json")
        yield 0, delta or ""
    else:
        yield body.get("index", 0), body.get("content", "")
