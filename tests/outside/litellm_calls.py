"""LiteLLM against a running server: what it reads from answers, and which of its exceptions errors become."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import litellm

litellm.suppress_debug_info = True
BASE = {"api_base": os.environ["UNBIND_URL"] + "/v1", "api_key": "none", "num_retries": 0}
ASKED = {**BASE, "max_tokens": 16, "temperature": 0}
TEXT: dict[str, Any] = {**ASKED, "model": "text-completion-openai/unbind-demo", "prompt": "def add(first, second):\n"}
CHAT: dict[str, Any] = {
    **ASKED,
    "model": "openai/unbind-demo",
    "messages": [{"role": "user", "content": "A parser."}],
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
LONG = "word " * 5000

whole = litellm.text_completion(**TEXT)
assert whole.usage.completion_tokens > 0
parts = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**TEXT, stream=True)]
assert "".join(parts) == whole.choices[0].text
print("ok completion, whole and streamed")

said = litellm.completion(**CHAT).choices[0].message.content
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**CHAT, stream=True)]
assert "".join(parts) == said
assert litellm.completion(**{**CHAT, "model": "hosted_vllm/unbind-demo"}).choices[0].message.content == said
print("ok chat, whole and streamed, as openai and as hosted_vllm")

RESPONSE = {**BASE, "model": "openai/unbind-demo", "input": "A parser.", "max_output_tokens": 16, "temperature": 0}
assert litellm.responses(**RESPONSE).output[0].content[0].text == said
events = list(litellm.responses(**RESPONSE, stream=True))
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said
print("ok responses, whole and streamed")

MESSAGE = {**CHAT, "api_base": os.environ["UNBIND_URL"], "model": "anthropic/unbind-demo"}
assert litellm.completion(**MESSAGE).choices[0].message.content == said
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**MESSAGE, stream=True)]
assert "".join(parts) == said
print("ok messages as anthropic, whole and streamed")

filtered = litellm.text_completion(**TEXT, extra_body={"unbind": {"modules": ["demo-a"]}})
assert filtered.choices[0].text is not None
print("ok modules by the body")


def refused(name: str, kind: type[Exception], call: Callable[..., Any], **fields: Any) -> None:
    """The call ends with this exception."""
    try:
        call(**fields)
    except kind:
        print(f"ok {name}: {kind.__name__}")
    else:
        raise AssertionError(f"{name} was answered")


LONG_CHAT = {**CHAT, "messages": [{"role": "user", "content": LONG}]}
refused("a chat too long", litellm.ContextWindowExceededError, litellm.completion, **LONG_CHAT)
refused("a prompt too long", litellm.ContextWindowExceededError, litellm.text_completion, **{**TEXT, "prompt": LONG})
refused("tools", litellm.BadRequestError, litellm.completion, **CHAT, tools=TOOLS)
refused("another model", litellm.NotFoundError, litellm.completion, **{**CHAT, "model": "openai/other"})
refused("embeddings", litellm.NotFoundError, litellm.embedding, **BASE, model="openai/unbind-demo", input=["x"])
