"""From what clients send to token ids, encoded as fitting encodes them: plain, fill in the middle, chat, infill."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from server.api.inference.bodies.chat import TemplateOptions
from server.api.inference.bodies.messages import Message
from server.api.inference.bodies.tools import Tool
from server.api.inference.tools.formats import format_of, template_of
from server.errors import invalid
from server.service import Service
from unbind_core.encoding import beginning, fim_ids

REPOSITORY, FILE = "<|repo_name|>", "<|file_sep|>"  # Qwen2.5-Coder's words for files beside the one that is edited
MOST_SCORES = 2**20  # of prompts' tokens and their alternatives in a call: holding and writing one takes some 500 bytes
SNIPPET = "\n\n--- {name} ---\n\n"


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and the text to give back where an echo is asked for, which the ids at the places ``spelt`` spell; all
    do where it is None.
    """

    ids: Sequence[int]
    text: str = ""
    truncated: bool = False
    spelt: range | None = None


def completion_prompts(
    served: Service, prompt: str | Sequence[Any], suffix: str | None, echo: bool, kept: int | None = None
) -> list[Prompt]:
    """The prompts of a completion, of each the last ``kept`` tokens. ``suffix`` makes the one prompt a gap to fill."""
    tokenizer, encoder = served.loaded.tokenizer, served.encoder
    if isinstance(prompt, str):
        if suffix is not None:
            before, behind = encoder.ids(prompt, "prompt"), encoder.ids(suffix, "suffix", behind=True)
            ids = gap(served, before, behind, "suffix")
            start = gap_start(served, behind)
            return [Prompt(ids, prompt, spelt=range(start, start + len(before)))]
        return [_of_text(served, prompt, "prompt", beginning(tokenizer), kept)]
    prompts, begins = [], beginning(tokenizer)
    items: Sequence[Any] = [prompt] if isinstance(prompt[0], int) else prompt
    if len(items) > served.most_requests:
        raise invalid(
            f"prompt: {len(items)} prompts are over the {served.most_requests} that this server holds", "prompt"
        )
    for item in items:
        if isinstance(item, str):
            prompts.append(_of_text(served, item, "prompt", begins, kept))
        else:
            ids = list(item if kept is None else item[-kept:])
            encoder.check(ids, "prompt")
            check_ids(served, ids, "prompt")
            prompts.append(Prompt(ids, str(tokenizer.decode(ids)) if echo else "", truncated=len(ids) < len(item)))
    return prompts


def _of_text(
    served: Service, text: str, field: str, lead: list[int], kept: int | None, most: int | None = None
) -> Prompt:
    """``lead`` and a text's ids, or the last ``kept`` of them, whatever the text's length. Raises ApiError 400 where what is to be
    kept is too long, or the whole where all is.
    """
    if kept is None or kept > served.encoder.length:
        ids = lead + served.encoder.ids(text, field, most)
        return Prompt(ids, text, spelt=range(len(lead), len(ids)))
    found, whole = served.encoder.last(text, kept)
    ids = lead + found
    if whole and len(ids) <= kept:
        return Prompt(ids, text, spelt=range(len(lead), len(ids)))
    return Prompt(ids[-kept:], str(served.loaded.tokenizer.decode(ids[-kept:])), truncated=True)


def check_ids(served: Service, ids: Sequence[int], field: str) -> None:
    """Raise 400 where a token id is not one of the model's."""
    if not all(0 <= token < served.vocabulary for token in ids):
        raise invalid(f"{field}: token ids must be from 0 to {served.vocabulary - 1}", field)


def check_scores(prompts: Sequence[Prompt], answers: int, alternatives: int | None, field: str) -> None:
    """Raise 400 where each of ``answers`` has its prompt's scores, and all of them would fill the memory."""
    if alternatives is None:
        return
    scores = sum(len(prompt.ids) for prompt in prompts) * answers * (alternatives + 1)
    if scores > MOST_SCORES:
        raise invalid(
            f"{field}: {scores} scores of prompts in a call, and {MOST_SCORES} are the most; ask for fewer alternatives or answers",
            field,
            "too_many_scores",
        )


def gap(served: Service, prefix: list[int], suffix: list[int], field: str) -> list[int]:
    """A fill-in-the-middle prompt. Raises ApiError where the model has no tokens for it."""
    if served.fim is None:
        raise invalid(
            f"{field}: this model's tokenizer has no fill-in-the-middle tokens; leave {field} out, or name the tokens in "
            "the setting fim_template",
            field,
            "no_fill_in_the_middle",
        )
    return fim_ids(served.loaded.tokenizer, served.fim, prefix, suffix)


def gap_start(served: Service, suffix: list[int]) -> int:
    """Where the prefix begins in the prompt of a gap before ``suffix``."""
    assert served.fim is not None
    before = served.fim[: served.fim.index("{prefix}")]
    lengths = (len(suffix) if part == "{suffix}" else 1 for part in before)
    return len(beginning(served.loaded.tokenizer)) + sum(lengths)


def chat_prompt(
    served: Service,
    messages: Sequence[Message],
    options: TemplateOptions,
    most: int | None = None,
    kept: int | None = None,
    tools: Sequence[Tool] = (),
) -> Prompt:
    """A conversation through the tokenizer's own chat template: its last ``kept`` tokens, or all, which ``most`` bounds.

    ``tools``: functions that the template tells of. Raises ApiError where there is no template or it refuses them.
    """
    tokenizer = served.loaded.tokenizer
    if not tokenizer.chat_template:
        raise invalid(
            "messages: this model's tokenizer has no chat template; send a prompt to /v1/completions instead",
            param="messages",
            code="no_chat_template",
        )
    template = template_of(tokenizer)
    for place, message in enumerate(messages):
        if message.tool_calls and "tool_calls" not in template:
            raise invalid(
                f"messages.{place}.tool_calls: this model's chat template knows no calls of functions; leave them out",
                f"messages.{place}.tool_calls",
                "unsupported_parameter",
            )
    form = format_of(template, served.settings.tool_format)
    as_text = form is not None and form.arguments_as_text and not re.search(r"arguments\W*\|\s*tojson", template)
    going_on, begun = options.continue_final_message, options.add_generation_prompt
    try:
        text = tokenizer.apply_chat_template(
            [message.plain(arguments_as_text=as_text) for message in messages],
            tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=begun if begun is not None else not going_on,
            continue_final_message=going_on,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise invalid(f"messages: the chat template refuses them: {str(error)[:300]}", param="messages") from None
    return _of_text(served, str(text), "messages", [], kept, most)


def infill_prompt(
    served: Service, prefix: str, suffix: str, extra: Sequence[tuple[str, str]], after: str, new_tokens: int
) -> Prompt:
    """A gap with other files in front and ``after`` behind its last token, cut to what fits beside ``new_tokens``.

    The text near the gap stays: three quarters of the room for the prefix, the rest for the suffix, either taking what
    the other leaves; then the files nearest to the end of ``extra``.
    """
    encoder = served.encoder
    tail = encoder.ids(after, "prompt", behind=True)
    beside = max(new_tokens, served.engine.least_tokens)
    room = served.settings.max_model_len - beside - len(gap(served, [], [], "input_suffix")) - len(tail)
    behind, all_behind = encoder.first(suffix, room)
    kept, all_before = encoder.last(prefix, max(room * 3 // 4, room - len(behind)))
    rest = behind[: max(0, room - len(kept))]
    shown, all_files = encoder.last(_files(served, extra), room - len(kept) - len(rest))
    truncated = not (all_before and all_behind and all_files and len(rest) == len(behind))
    ids = gap(served, kept, rest, "input_suffix")
    start = len(beginning(served.loaded.tokenizer))
    return Prompt([*ids[:start], *shown, *ids[start:], *tail], truncated=truncated)


def _files(served: Service, extra: Sequence[tuple[str, str]]) -> str:
    if not extra:
        return ""
    if {REPOSITORY, FILE} <= served.loaded.tokenizer.get_vocab().keys():
        parts = "".join(f"{FILE}{name}\n{text}" for name, text in extra)
        return f"{REPOSITORY}project\n{parts}{FILE}file\n"
    return "".join(SNIPPET.format(name=name or "snippet") + text for name, text in extra) + "\n"


def size_of(prompt: str | Sequence[Any], *more: str | None) -> int:
    """Characters and ids of a prompt and other texts, which say how long the tokenizer will take."""
    own = len(prompt) if isinstance(prompt, str) else sum(1 if isinstance(one, int) else len(one) for one in prompt)
    return own + sum(len(text) for text in more if text)


def chat_size(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """Characters of a conversation, likewise."""
    return sum(message.size for message in messages) + sum(tool.size for tool in tools)
