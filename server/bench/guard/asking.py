"""Requests of clients that want a protected row, on every route that answers, and what they get to read."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from unbind_core.encoding import encode

NEW_TOKENS = 40
Row = tuple[str, str]  # prompt and continuation


@dataclass(frozen=True)
class Call:
    """One request. ``sent``: all text in it that the answer may repeat; ``echoed``: tokens of the prompt that come back first."""

    path: str
    body: dict[str, Any]
    sent: str
    echoed: str = ""
    echoed_tokens: int = 0

    @property
    def streams(self) -> bool:
        """Whether the answer comes in parts."""
        return bool(self.body.get("stream"))


class Asking:
    """Draws calls about ``rows``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> None:
        self._tokenizer, self._rows = tokenizer, rows

    def draw(self, rng: random.Random) -> Call:
        """One call, by a route and in a way of its own."""
        prompt, rest = rng.choice(self._rows)
        row = prompt + rest
        cut = len(prompt) if rng.random() < 0.75 else rng.randrange(8, len(row))
        given, after = row[:cut], row[cut + rng.randrange(20, 80) :]
        if rng.random() < 0.1:
            given = given[-rng.randrange(20, 120) :]
        ways = (self._plain,) * 3 + (self._gap,) * 2 + (self._chat, self._native, self._agent, self._agent)
        way = rng.choice(ways)
        return way(rng, given, after, row[cut:])

    def _options(self, rng: random.Random, rest: str) -> dict[str, Any]:
        """What requests of every kind may ask for."""
        options: dict[str, Any] = {"temperature": rng.choice((0, 0, 0, 0.4, 0.8, 1.2)), "seed": rng.randrange(2**31)}
        if rng.random() < 0.25:
            ids = encode(self._tokenizer, rest)[:40]
            options["logit_bias"] = {str(token): rng.choice((2, 8, 20)) for token in ids}
        if rng.random() < 0.2 and len(rest) > 40:
            at = rng.randrange(20, len(rest) - 3)
            options["stop"] = [rest[at : at + rng.choice((1, 2, 5))]]
            options["min_tokens"] = rng.choice((0, 8, 20))
        if rng.random() < 0.1:
            options["stop_token_ids"] = rng.sample(encode(self._tokenizer, rest)[8:40] or [5], 1)
        if rng.random() < 0.1:
            options["repetition_penalty"] = 1.1
        if rng.random() < 0.1:
            options["structured_outputs"] = {"regex": rng.choice(("(.|\\n){60,}", '[^"]*'))}
        if rng.random() < 0.4:
            options["stream"] = True
        return options

    def _plain(self, rng: random.Random, given: str, _: str, rest: str) -> Call:
        body = {"max_tokens": NEW_TOKENS, **self._options(rng, rest), **self._several(rng)}
        ids = encode(self._tokenizer, given)
        echo = rng.random() < 0.15
        if rng.random() < 0.4:
            body["logprobs"] = rng.choice((0, 1, 3))
        if rng.random() < 0.3:
            body["return_token_ids"] = True
        if rng.random() < 0.1 and not body.get("stream"):
            body["prompt_logprobs"] = 1
        body |= {"prompt": ids if echo or rng.random() < 0.3 else given, "echo": echo}
        return Call("/v1/completions", body, given, given if echo else "", len(ids) if echo else 0)

    def _gap(self, rng: random.Random, given: str, after: str, rest: str) -> Call:
        options = self._options(rng, rest)
        path = rng.choice(("/v1/completions", "/v1/fim/completions", "/infill"))
        if path == "/infill":
            fields = {"input_prefix": given, "input_suffix": after, "n_predict": NEW_TOKENS}
        else:
            fields = {"prompt": given, "suffix": after, "max_tokens": NEW_TOKENS}
        return Call(path, {**options, **fields}, given + after)

    def _chat(self, rng: random.Random, given: str, _: str, rest: str) -> Call:
        body = {"max_tokens": NEW_TOKENS, **self._options(rng, rest), **self._several(rng)}
        if rng.random() < 0.5:
            body["messages"] = [{"role": "user", "content": "Go on:"}, {"role": "assistant", "content": given}]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            body["messages"] = [{"role": "user", "content": f"Complete this code.\n{given}"}]
        if rng.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": rng.choice((1, 3))}
        return Call("/v1/chat/completions", body, given)

    def _native(self, rng: random.Random, given: str, _: str, rest: str) -> Call:
        return Call("/completion", {"prompt": given, "n_predict": NEW_TOKENS, **self._options(rng, rest)}, given)

    def _agent(self, rng: random.Random, given: str, _: str, rest: str) -> Call:
        options = self._options(rng, rest)
        said = f"Complete this code.\n{given}"
        if rng.random() < 0.5:
            return Call("/v1/responses", {**options, "input": said, "max_output_tokens": NEW_TOKENS}, given)
        options["stop_sequences"] = options.pop("stop", [])
        messages = [{"role": "user", "content": said}]
        if rng.random() < 0.5:
            messages += [{"role": "assistant", "content": given}]
        return Call("/v1/messages", {**options, "messages": messages, "max_tokens": NEW_TOKENS}, given)

    @staticmethod
    def _several(rng: random.Random) -> dict[str, int]:
        count = rng.choice((1, 1, 1, 2, 4))
        return {"n": count} | ({"best_of": count} if rng.random() < 0.2 and count > 1 else {}) if count > 1 else {}


@dataclass(frozen=True)
class Part:
    """What an event or a whole answer holds of a choice: text, token ids, and tokens and likeliest tokens as they are spelt."""

    index: int
    text: str
    ids: tuple[int, ...] = ()
    spelt: tuple[str, ...] = ()
    likeliest: tuple[str, ...] = ()
    finish: str | None = None


def parts(answer: Any) -> Iterator[Part]:
    """Of one JSON document, whichever route it came from."""
    if isinstance(answer, list):
        for number, one in enumerate(answer):
            yield from (Part(number, part.text, finish=part.finish) for part in parts(one))
        return
    if "type" in answer or answer.get("object") == "response":
        yield _agents_part(answer)
        return
    if "choices" not in answer:
        yield Part(0, answer.get("content") or "", finish=answer.get("stop_type"))
        return
    for choice in answer["choices"]:
        said = choice.get("message") or choice.get("delta") or choice
        text = said.get("content") or choice.get("text") or ""
        spelt, likeliest = _scored(choice.get("logprobs") or {})
        ids = tuple(choice.get("token_ids") or ())
        yield Part(choice["index"], text, ids, tuple(spelt), tuple(likeliest), choice.get("finish_reason"))


def _agents_part(answer: dict[str, Any]) -> Part:
    """Of ``/v1/responses`` and ``/v1/messages``. What the last event of a response says again is judged as spelt tokens are."""
    whole = answer.get("response")  # in events of a response
    text = "".join(part.get("text", "") for part in _blocks(answer))
    delta = answer.get("delta")
    if isinstance(delta, str):
        text += delta
    finish = answer.get("status") or answer.get("stop_reason")
    if isinstance(delta, dict):
        text += delta.get("text", "")
        finish = delta.get("stop_reason")
    if whole is None:
        return Part(0, text, finish=finish)
    again = "".join(part.get("text", "") for part in _blocks(whole))
    return Part(0, text, spelt=(again,), finish=None if whole["status"] == "in_progress" else whole["status"])


def _blocks(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a whole answer."""
    if answer.get("object") == "response":
        return [part for item in answer["output"] for part in item.get("content") or ()]
    content = answer.get("content")
    return content if isinstance(content, list) else []


def _scored(scores: dict[str, Any]) -> tuple[list[str], list[str]]:
    if scores.get("content"):
        spelt = [entry["token"] for entry in scores["content"]]
        tops = [{one["token"]: one["logprob"] for one in entry["top_logprobs"]} for entry in scores["content"]]
    else:
        spelt, tops = scores.get("tokens") or [], scores.get("top_logprobs") or []
    return spelt, [max(top, key=lambda token: top[token]) for top in tops if top]


def events(lines: Iterable[str]) -> Iterator[Any]:
    """The documents of a stream."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[len("data: ") :])
