"""Every text in a choice of an answer, by the channel that it goes on in. What is not known is followed as well, or refused.

A channel is what a client puts together from the parts of a stream: ``content``, the arguments of one tool call, the tokens beside
log-probabilities, and of their alternatives those of each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.proxy.refusal import Unguardable

LABEL_LENGTH = 256  # characters of what names a thing, and is no text
NAME_LENGTH = 64  # of the name of a field, which no index is asked about: as many as a function's may have
ARGUMENTS = "arguments"
_CHOICE_LABELS = {"finish_reason"}
_PART_LABELS = {"role", "type", "id"}
NUMBERS = {
    "token_ids",
    "prompt_token_ids",
    "bytes",
    "text_offset",
    "token_logprobs",
}  # lists of them go as their texts go
_FRAME_LABELS = {"id", "object", "model", "system_fingerprint", "service_tier", "provider", "obfuscation"}
_RANKED = {"top_logprobs", "top_probs"}  # the second as llama.cpp writes it under post_sampling_probs
_SPELT = {"token", "bytes", *_RANKED}
_AN_ID = re.compile(r"token_id:\d+")  # in place of a token's text, as vLLM writes it


@dataclass(frozen=True)
class Text:
    """A part of a channel. ``holder`` and ``name``: where it stands and can be cut; None where only the whole can go."""

    channel: str
    text: str
    holder: Any = None
    name: Any = None


def texts_of(choice: Mapping[str, Any]) -> Iterator[Text]:
    """Every text of a choice of a whole answer or of a stream, in order. Raises Unguardable."""
    for name, value in choice.items():
        if name in _CHOICE_LABELS:
            _label(name, value)
        elif name in ("delta", "message"):
            yield from _message(_object(value, name)) if value is not None else ()
        elif name == "logprobs":
            yield from _logprobs(_object(value, name)) if value is not None else ()
        elif name == "text":
            yield from _text(choice, name, "text")
        elif name != "index":
            yield from _any(choice, name, name)


def _message(message: Mapping[str, Any]) -> Iterator[Text]:
    for name, value in message.items():
        if name in _PART_LABELS:
            _label(name, value)
        elif name == "content" and isinstance(value, list):
            for part in value:
                yield from _part(_object(part, "content"))
        elif name == "tool_calls" and value is not None:
            if not isinstance(value, list):
                raise Unguardable("tool_calls is no list")
            for place, call in enumerate(value):
                yield from _call(_object(call, "tool_calls"), place)
        elif name == "function_call" and value is not None:
            yield from _function(_object(value, name), "function_call")
        else:
            yield from _any(message, name, name)


def _part(part: Mapping[str, Any]) -> Iterator[Text]:
    """A part of a content that is a list. Of whatever type: a client may put the texts of all of them together."""
    for name, value in part.items():
        if name in _PART_LABELS:
            _label(name, value)
        elif name in ("text", "refusal"):
            yield from _text(part, name, "content")
        else:
            raise Unguardable(f"a part of the content has '{name[:80]}'")


def _call(call: Mapping[str, Any], place: int) -> Iterator[Text]:
    number = call.get("index", place)
    if type(number) is not int:  # true is one to many readers, and another to who writes it down as a name
        raise Unguardable("the index of a tool call is no number")
    for name, value in call.items():
        if name == "type":
            _label(name, value)
        elif name == "function" and value is not None:
            yield from _function(_object(value, name), f"tool_calls.{number}")
        elif name != "index":  # an id too may be the model's own words: Kimi K2 writes it in front of each call
            yield from _any(call, name, f"tool_calls.{number}.{name}")


def _function(function: Mapping[str, Any], channel: str) -> Iterator[Text]:
    for name in function:
        yield from _any(function, name, f"{channel}.{name}")


def _logprobs(logprobs: Mapping[str, Any]) -> Iterator[Text]:
    for name, value in logprobs.items():
        channel = f"logprobs.{name}"
        if value is None:
            continue
        if not isinstance(value, list) or len(name) > NAME_LENGTH:
            yield from _cutless(_any(logprobs, name, channel))
        elif name == "top_logprobs":
            for alternatives in value:
                ranked = sorted(_object(alternatives or {}, name).items(), key=_score, reverse=True)
                yield from (Text(f"{channel}.{rank}", _no_id(token)) for rank, (token, _) in enumerate(ranked))
        elif name in NUMBERS:
            yield from _cutless(_any(logprobs, name, channel))
        else:
            for entry in value:
                if isinstance(entry, str):
                    yield Text(channel, entry)
                else:
                    yield from _spelt(_object(entry, name), channel)


def _spelt(entry: Mapping[str, Any], channel: str) -> Iterator[Text]:
    """A token with its alternatives, by rank."""
    yield Text(channel, _spelling(entry))
    for name in _RANKED & entry.keys():
        alternatives = entry[name] or []
        if not isinstance(alternatives, list):
            raise Unguardable(f"'{name}' is no list")
        # As they stand the chosen token may come first, as vLLM puts it, so that the likeliest would stand now here, now there.
        ranked = sorted((_object(alternative, name) for alternative in alternatives), key=_likelihood, reverse=True)
        for rank, alternative in enumerate(ranked):
            yield Text(f"{channel}.{name}.{rank}", _spelling(alternative))
            yield from _others(alternative, f"{channel}.{name}.{rank}")
    yield from _others(entry, channel)


def _others(entry: Mapping[str, Any], channel: str) -> Iterator[Text]:
    for name in entry.keys() - _SPELT:
        yield from _cutless(_any(entry, name, f"{channel}.{name}"))


def _no_id(token: str) -> str:
    if _AN_ID.fullmatch(token):
        raise Unguardable("tokens are told by their ids")
    return token


def _spelling(entry: Mapping[str, Any]) -> str:
    """A token's text: by its bytes where they are there, for half a character can be said by them alone."""
    token, raw = entry.get("token"), entry.get("bytes")
    if isinstance(token, str):
        _no_id(token)
    if raw:
        try:
            return bytes(iter(raw)).decode(errors="replace")  # of a number they would be as many zeros
        except (TypeError, ValueError):
            raise Unguardable("the bytes of a token are none") from None
    if not isinstance(token, str):
        raise Unguardable("a token of the log-probabilities has no text")
    return token


def _score(alternative: tuple[str, Any]) -> float:
    return _number(alternative[1])


def _likelihood(alternative: Mapping[str, Any]) -> float:
    return _number(alternative.get("logprob", alternative.get("prob")))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("-inf")


def _cutless(found: Iterator[Text]) -> Iterator[Text]:
    return (Text(one.channel, one.text) for one in found)


def _text(holder: Mapping[str, Any], name: str, channel: str) -> Iterator[Text]:
    value = holder[name]
    if isinstance(value, str):
        yield Text(channel, value, holder, name)
    elif value is not None:
        raise Unguardable(f"'{name}' is no text")


def _any(holder: Any, name: Any, channel: str) -> Iterator[Text]:
    """Every text under a name that is not known, and the names in it: lists go on in one channel. Numbers alone pass, lists of
    them do not: they may be anything.
    """
    value = holder[name]
    if isinstance(name, str) and len(name) > NAME_LENGTH:
        raise Unguardable(f"the name of a field, '{name[:40]}...', is longer than {NAME_LENGTH} characters")
    if isinstance(value, str):
        yield Text(channel, value, holder, name)
    elif isinstance(value, dict):
        for inner in value:
            yield from _any(value, inner, f"{channel}.{inner}")
    elif isinstance(value, list):
        numbers = any(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value)
        if numbers and channel.rpartition(".")[2] not in NUMBERS:
            raise Unguardable(f"'{channel[:80]}' is a list of numbers, in which anything may stand")
        for place in range(len(value)):
            yield from _any(value, place, channel)


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Unguardable(f"'{name}' is no object")
    return value


def _label(name: str, value: Any) -> None:
    """Refuse what is too long to name a thing."""
    if not (value is None or (isinstance(value, str) and len(value) <= LABEL_LENGTH)):
        raise Unguardable(f"'{name}' is no short text")


def frame_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """What stands around the choices: names and counts. What else is there is left out: nobody follows it. Raises Unguardable."""
    frame = {}
    for name, value in document.items():
        if name in _FRAME_LABELS:
            _label(name, value)
        elif name == "choices" or not (name in NUMBERS or _counts(value)):
            continue
        frame[name] = value
    return frame


def _counts(value: Any) -> bool:
    if isinstance(value, dict):
        return all(len(name) <= NAME_LENGTH and _counts(inner) for name, inner in value.items())
    return value is None or isinstance(value, (int, float)) or value in ([], "")
