"""Text -> token ids: the one place that turns a prompt into ids, so that a fit and the service see the same states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from unbind_core.errors import DataError

FORMS = ("plain", "fim")
# What the families' tokenizers call the fill-in-the-middle parts, in prompt order; {prefix} and {suffix} stand for the code.
FIM_TEMPLATES: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "{prefix}", "<|fim_suffix|>", "{suffix}", "<|fim_middle|>"),  # Qwen2.5-Coder
    ("<fim_prefix>", "{prefix}", "<fim_suffix>", "{suffix}", "<fim_middle>"),  # StarCoder, StarCoder2
    ("<fim-prefix>", "{prefix}", "<fim-suffix>", "{suffix}", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "{prefix}", "▁<SUF>", "{suffix}", "▁<MID>"),  # CodeLlama
    ("<｜fim▁begin｜>", "{prefix}", "<｜fim▁hole｜>", "{suffix}", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("[SUFFIX]", "{suffix}", "[PREFIX]", "{prefix}"),  # Codestral
)
_TOLD = "_told_fim_template"  # kept on the tokenizer, so that whoever has it asks alike
FIM_PADS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")
FIM_END = "▁<EOT>"  # what CodeLlama writes behind a gap that it has filled
BLANKS = ("▁", "Ġ")  # what a blank is in vocabularies
MARK = "☺"  # before a text, to take the blank; nothing is merged with it


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of ``text`` alone, without special tokens in front or behind."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def require_known(tokenizer: PreTrainedTokenizerBase, vocabulary: int, texts: Iterable[tuple[str, str]]) -> None:
    """Raise DataError where one of ``texts``, each behind the name of its place, has a token that the tokenizer has and a model of
    ``vocabulary`` embeddings has not, as where tokens were added and the model was not made larger.
    """
    if max(tokenizer.get_vocab().values()) < vocabulary:
        return
    for place, text in texts:
        if (foreign := max(encode(tokenizer, text), default=0)) >= vocabulary:
            raise DataError(
                f"{place}: the tokenizer has the token {tokenizer.convert_ids_to_tokens(foreign)!r}, and the model does not; "
                "leave it out, or make the model larger by resize_token_embeddings and train it"
            )


def encode_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of ``text`` as it stands behind other tokens: without the blank that tokenizers of SentencePiece's kind put before
    whatever they are given (Llama 2, CodeLlama, Mistral, Phi-3).
    """
    ids = encode(tokenizer, text)
    if not ids or not str(tokenizer.convert_ids_to_tokens(encode(tokenizer, "a")[0])).startswith(BLANKS):
        return ids
    mark = encode(tokenizer, MARK)
    behind = encode(tokenizer, MARK + text)
    return behind[len(mark) :] if behind[: len(mark)] == mark else ids


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS id in a list, or an empty list where the tokenizer defines none, or puts none before a text (StarCoder2, Phi-3)."""
    begins = tokenizer("a")["input_ids"][:1]
    return [int(tokenizer.bos_token_id)] if begins == [tokenizer.bos_token_id] else []


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt as every request must be encoded: BOS in front where the tokenizer puts one there."""
    return beginning(tokenizer) + encode(tokenizer, text)


def fim_template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...] | None:
    """The fill-in-the-middle template told to ``use_fim_template``, else that whose special tokens the tokenizer has, or None."""
    told: tuple[str, ...] | None = getattr(tokenizer, _TOLD, None)
    if told is not None:
        return told
    for template in FIM_TEMPLATES:
        if all(_is_token(tokenizer, part) for part in template if not part.startswith("{")):
            return template
    return None


def fim_markers(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of whatever fill-in-the-middle tokens the tokenizer has, of any family, and of those of its template."""
    templates = (*FIM_TEMPLATES, fim_template(tokenizer) or ())
    parts = {*FIM_PADS, *(part for known in templates for part in known)} - {"{prefix}", "{suffix}"}
    return frozenset(_token_id(tokenizer, part) for part in parts if _is_token(tokenizer, part))


def fim_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends what fills a gap, where it is another than what ends a text."""
    return _token_id(tokenizer, FIM_END) if _is_token(tokenizer, FIM_END) else None


def _is_token(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether the vocabulary has it; asking for one entry, as copying all of them takes a millisecond."""
    found: object = tokenizer.convert_tokens_to_ids(text)
    return isinstance(found, int) and (found != tokenizer.unk_token_id or text == tokenizer.unk_token)


def fim_prompt(tokenizer: PreTrainedTokenizerBase, prefix: str, suffix: str) -> list[int] | None:
    """Ids of a fill-in-the-middle prompt (BOS in front where defined); None where the tokenizer has no such tokens."""
    template = fim_template(tokenizer)
    if template is None:
        return None
    return fim_ids(tokenizer, template, encode(tokenizer, prefix), encode_behind(tokenizer, suffix))


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def use_fim_template(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Have gaps of this tokenizer's prompts written as ``text``, ``<PRE>{prefix}<SUF>{suffix}<MID>``, in requests, fits and
    measurements; where it is empty, as ever. Raises DataError where it cannot be one.
    """
    if not text:
        return
    parts = tuple(part for part in re.split(r"(\{prefix\}|\{suffix\})", text) if part)
    if sorted(part for part in parts if part in ("{prefix}", "{suffix}")) != ["{prefix}", "{suffix}"]:
        raise DataError("fim_template: must hold {prefix} and {suffix} once each, like <PRE>{prefix}<SUF>{suffix}<MID>")
    for part in parts:
        if not part.startswith("{") and not _is_token(tokenizer, part):
            raise DataError(f"fim_template: '{part}' is not one token of this tokenizer; use its own special tokens")
    setattr(tokenizer, _TOLD, parts)


def fim_ids(
    tokenizer: PreTrainedTokenizerBase, template: tuple[str, ...], prefix: list[int], suffix: list[int]
) -> list[int]:
    """Ids of a fill-in-the-middle prompt in the order of ``template``, BOS in front where defined."""
    ids = beginning(tokenizer)
    for part in template:
        if part == "{prefix}":
            ids += prefix
        elif part == "{suffix}":
            ids += suffix
        else:
            ids.append(_token_id(tokenizer, part))
    return ids


def available_forms(tokenizer: PreTrainedTokenizerBase, wanted: Sequence[str] | None = None) -> tuple[str, ...]:
    """The forms to use: all that the tokenizer has, or exactly those wanted.

    Raises DataError where a wanted form is unknown or the tokenizer lacks its tokens.
    """
    possible = FORMS if fim_template(tokenizer) else ("plain",)
    if wanted is None:
        return possible
    for form in wanted:
        if form not in FORMS:
            raise DataError(f"forms: '{form}' is unknown; choose from {', '.join(FORMS)}")
        if form not in possible:
            raise DataError(f"forms: the tokenizer has no fill-in-the-middle tokens; use forms {', '.join(possible)}")
    return tuple(form for form in FORMS if form in wanted)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any id will do for padding, since padded positions are masked: the tokenizer's own, else EOS, else 0."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


def marks(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of special tokens and of those for filling in the middle, but for the one that ends a text: of no code."""
    return tuple(sorted({*tokenizer.all_special_ids, *fim_markers(tokenizer)} - {tokenizer.eos_token_id}))


def decode_behind(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What ``ids`` add to the text of ``prompt``, special tokens left out. Many tokenizers strip the blank that a text begins with,
    which an answer's first one is not.
    """

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    before, whole = text(prompt), text([*prompt, *ids])
    # not where the prompt ends within a character
    return whole[len(before) :] if whole.startswith(before) else text(ids)
