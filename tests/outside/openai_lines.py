"""What older lines of openai for Python send, from 0.28 on, and how each reads answers, streams and refusals."""

import os
from collections.abc import Callable
from typing import Any

import openai

URL = os.environ["UNBIND_URL"] + "/v1"
MODEL = "unbind-demo"
SAID = [{"role": "user", "content": "A parser."}]
OLD = openai.__version__.startswith("0.")


def resources() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], type[Exception], type[Exception]]:
    """Completions, chats, one model; and the errors for a wrong field and for what is not there."""
    if OLD:
        openai.api_base, openai.api_key = URL, "none"
        wrong = openai.error.InvalidRequestError
        return openai.Completion.create, openai.ChatCompletion.create, openai.Model.retrieve, wrong, wrong
    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    models = client.models.retrieve
    return (
        client.completions.create,
        client.chat.completions.create,
        models,
        openai.BadRequestError,
        openai.NotFoundError,
    )


def refused(error: type[Exception], code: str, ask: Callable[[], Any]) -> None:
    """Asked, it is refused so."""
    found = None
    try:
        ask()
    except error as said:
        found = said
    assert found is not None and found.code == code and found.param, found


def extra(**fields: Any) -> dict[str, Any]:
    """Fields that the client does not know: the first line takes any."""
    return fields if OLD else {"extra_body": fields}


def main() -> None:
    """Every call once."""
    complete, chat, model, wrong, missing = resources()
    fixed: dict[str, Any] = {"model": MODEL, "prompt": "def add(", "max_tokens": 6, "temperature": 0}
    old = {"best_of": 1, "suffix": None, "user": "u", "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
    whole = complete(**fixed, **old, logprobs=2, echo=True)
    scores, text = whole.choices[0].logprobs, whole.choices[0].text
    assert text.startswith("def add(") and scores.token_logprobs[0] is None
    spelt = [text[at : at + len(token)] for at, token in zip(scores.text_offset, scores.tokens, strict=True)]
    assert spelt[1:] == scores.tokens[1:]  # the first is the beginning token, which has no text
    events = list(complete(**fixed, stream=True, logprobs=1))
    assert "def add(" + "".join(event.choices[0].text for event in events) == text
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert len(complete(**{**fixed, "prompt": ["def", "class"]}, n=2).choices) == 4
    gap = complete(**{**fixed, "suffix": "\n    return total\n"})
    assert gap.usage.prompt_tokens > whole.usage.prompt_tokens
    under = complete(**fixed, **extra(unbind={"modules": ["demo-a"], "report": True}))
    assert under.choices[0].unbind["modules"][0]["name"] == "demo-a"
    said: dict[str, Any] = {"model": MODEL, "messages": SAID, "max_tokens": 6}
    assert len(chat(**said, n=2, user="u", function_call="none").choices) == 2
    deltas = [event.choices[0] for event in chat(**said, stream=True)]
    assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == "length"
    assert model(MODEL).id == MODEL
    refused(missing, "model_not_found", lambda: model("other"))
    refused(missing, "model_not_found", lambda: complete(**{**fixed, "model": "other"}))
    refused(wrong, "context_length_exceeded", lambda: complete(**{**fixed, "max_tokens": 99_999}))
    refused(wrong, "context_length_exceeded", lambda: list(complete(**{**fixed, "max_tokens": 99_999}, stream=True)))
    refused(wrong, "invalid_value", lambda: complete(**{**fixed, "temperature": -1}))
    refused(wrong, "unsupported_parameter", lambda: chat(**said, functions=[{"name": "f", "parameters": {}}]))
    print(openai.__version__, "all calls")


main()
