"""From what clients send to token ids, encoded as fitting encodes them: plain, fill in the middle, chat, infill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from server.errors import invalid
from server.service import Service
from unbind_core.encoding import encode, encode_prompt, fim_ids

REPOSITORY, FILE = "<|repo_name|>", "<|file_sep|>"  # Qwen2.5-Coder's words for files beside the one that is edited
SNIPPET = "\n\n--- {name} ---\n\n"


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and the text to give back where an echo is asked for."""

    ids: Sequence[int]
    text: str = ""
    truncated: bool = False


def completion_prompts(served: Service, prompt: str | Sequence[Any], suffix: str | None, echo: bool) -> list[Prompt]:
    """The prompts of a completion. ``suffix`` makes the one prompt a gap to fill."""
    tokenizer = served.loaded.tokenizer
    if isinstance(prompt, str):
        if suffix is not None:
            return [Prompt(gap(served, encode(tokenizer, prompt), encode(tokenizer, suffix), "suffix"), prompt)]
        return [Prompt(encode_prompt(tokenizer, prompt), prompt)]
    prompts = []
    items: Sequence[Any] = [prompt] if isinstance(prompt[0], int) else prompt
    for item in items:
        if isinstance(item, str):
            prompts.append(Prompt(encode_prompt(tokenizer, item), item))
        else:
            check_ids(served, item, "prompt")
            prompts.append(Prompt(list(item), str(tokenizer.decode(item)) if echo else ""))
    return prompts


def check_ids(served: Service, ids: Sequence[int], field: str) -> None:
    """Raise 400 where a token id is not one of the model's."""
    if not all(0 <= token < served.vocabulary for token in ids):
        raise invalid(f"{field}: token ids must be from 0 to {served.vocabulary - 1}", field)


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


def chat_prompt(served: Service, messages: Sequence[Mapping[str, str]]) -> Prompt:
    """A conversation through the tokenizer's own chat template."""
    tokenizer = served.loaded.tokenizer
    if not tokenizer.chat_template:
        raise invalid(
            "messages: this model's tokenizer has no chat template; send a prompt to /v1/completions instead",
            param="messages",
            code="no_chat_template",
        )
    try:
        text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise invalid(f"messages: the chat template refuses them: {error}", param="messages") from None
    return Prompt(encode(tokenizer, str(text)), str(text))


def infill_prompt(
    served: Service, prefix: str, suffix: str, extra: Sequence[tuple[str, str]], after: str, new_tokens: int
) -> Prompt:
    """A gap with other files in front and ``after`` behind its last token, cut to what fits beside ``new_tokens``.

    The text near the gap stays: three quarters of the room for the prefix, the rest for the suffix, either taking what
    the other leaves; then the files nearest to the end of ``extra``.
    """
    tokenizer = served.loaded.tokenizer
    tail = encode(tokenizer, after)
    before, behind = encode(tokenizer, prefix), encode(tokenizer, suffix)
    room = served.settings.max_model_len - new_tokens - len(gap(served, [], [], "input_suffix")) - len(tail)
    for_prefix = max(room * 3 // 4, room - len(behind))
    kept = before[max(0, len(before) - for_prefix) :] if for_prefix > 0 else []
    rest = behind[: max(0, room - len(kept))]
    files = _files(served, extra)
    left = room - len(kept) - len(rest)
    shown = files[max(0, len(files) - left) :] if left > 0 else []
    truncated = len(kept) + len(rest) + len(shown) < len(before) + len(behind) + len(files)
    ids = gap(served, kept, rest, "input_suffix")
    start = 1 if tokenizer.bos_token_id is not None else 0
    return Prompt([*ids[:start], *shown, *ids[start:], *tail], truncated=truncated)


def _files(served: Service, extra: Sequence[tuple[str, str]]) -> list[int]:
    if not extra:
        return []
    tokenizer = served.loaded.tokenizer
    if {REPOSITORY, FILE} <= tokenizer.get_vocab().keys():
        parts = "".join(f"{FILE}{name}\n{text}" for name, text in extra)
        return encode(tokenizer, f"{REPOSITORY}project\n{parts}{FILE}file\n")
    return encode(tokenizer, "".join(SNIPPET.format(name=name or "snippet") + text for name, text in extra) + "\n")
