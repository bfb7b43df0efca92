"""Log-probabilities in the two shapes that clients know: the completions' lists and the chat's objects."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from server.engine.pieces import BYTE_OF
from server.engine.request import TokenLogprob

REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
FLOOR = -9999.0  # JSON has no minus infinity; and in chats, where a number must stand, for what is withheld


@lru_cache(maxsize=4)
def _added(tokenizer: PreTrainedTokenizerBase) -> dict[int, bool]:
    """Tokens that stand for themselves, and whether texts leave them out. The library makes the table anew each time."""
    return {token: bool(added.special) for token, added in tokenizer.added_tokens_decoder.items()}


@lru_cache(maxsize=65_536)  # tokens come again: an answer's scores name thousands, over and over
def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """The bytes that a token stands for, alone; a part of a character too."""
    written = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(written, str):
        return b""
    if token in _added(tokenizer):
        return written.encode()
    if found := _BYTE.fullmatch(written):
        return bytes([int(found[1], 16)])
    if "▁" in written:
        return written.replace("▁", " ").encode()
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if REPLACEMENT in text and all(character in BYTE_OF for character in written):
        return bytes(BYTE_OF[character] for character in written)
    return text.encode()


def token_text(raw: bytes) -> str:
    """A token as text; one that is half a character as ``bytes:\\xe2\\x82``."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float:
    return FLOOR if logprob is None else max(logprob, FLOOR)


class LegacyLogprobs:
    """The shape of ``/v1/completions``; keeps count of the text over the chunks of a stream."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(
        self, entries: Sequence[TokenLogprob | None], prompt: Sequence[int] = (), spelt: range | None = None
    ) -> dict[str, list[Any]]:
        """Parallel lists. The first entries are those of the echoed ``prompt``; nothing predicts its first token, which has null
        for its scores, as a token has whose scores are withheld. ``spelt``: the places of the prompt whose tokens its text spells,
        where others were added to it.
        """
        spelt = range(len(prompt)) if spelt is None else spelt
        shaped: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for index, entry in enumerate(entries):
            token = entry.token if entry is not None else prompt[0]
            raw = token_bytes(self._tokenizer, token)
            shaped["tokens"].append(token_text(raw))
            scored = None if entry is None or entry.logprob is None else entry
            shaped["token_logprobs"].append(None if scored is None else _finite(scored.logprob))
            shaped["top_logprobs"].append(None if scored is None else self._top(scored))
            # special tokens are in the text only where the prompt spelt them
            shown = index in spelt if index < len(prompt) else not _added(self._tokenizer).get(token, False)
            shaped["text_offset"].append(self._place(raw if shown else b""))
        return shaped

    def _place(self, raw: bytes) -> int:
        """Where a token begins in the text; what was half a character before it and stays so stands in front."""
        decoded = self._decoder.decode(raw)
        self._offset += len(decoded)
        try:
            return self._offset - len(raw.decode())
        except UnicodeDecodeError:
            return self._offset - len(decoded)

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Text -> log-probability; the likelier of two tokens that read alike, and the chosen one always."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(token_text(token_bytes(self._tokenizer, token)), _finite(logprob))
        return top


def prompt_logprobs(
    tokenizer: PreTrainedTokenizerBase, entries: Sequence[TokenLogprob | None], alternatives: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: for each prompt token, token id -> score, the prompt's own token first; null for the first token, which nothing
    predicts, and for those that are withheld.
    """

    def one(token: int, logprob: float | None, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token_bytes(tokenizer, token))}

    def by_id(entry: TokenLogprob) -> dict[str, dict[str, Any]]:
        best = {str(token): one(token, score, i) for i, (token, score) in enumerate(entry.top[:alternatives], 1)}
        return {str(entry.token): one(entry.token, entry.logprob, entry.rank)} | best

    return [None if entry is None or entry.logprob is None else by_id(entry) for entry in entries]


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
    """The shape of ``/v1/chat/completions``, in which what is withheld reads as what is as good as impossible."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token)
        return {"token": token_text(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**one(entry.token, entry.logprob), "top_logprobs": [one(*alternative) for alternative in entry.top]}
        for entry in entries
        if entry is not None
    ]
    return {"content": content, "refusal": None}
