"""Tokens -> text as it streams: whole characters only, and never a part of a stop string.

Sits between the sampler and the answer: one ``TextStream`` for each request.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from server.engine.pieces import pieces_of

REPLACEMENT = "\ufffd"


class TextStream:
    """Turns one request's tokens into text, a piece at a time.

    A piece is held back while it ends in half a character or in what may become a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces_of(tokenizer)
        self._utf8 = getincrementaldecoder("utf-8")("replace") if self._pieces.byte_level else None
        self._stop = tuple(one for one in stop if one)
        self._stop_ids = frozenset(self._pieces.by_text[text] for text in stop if text in self._pieces.by_text)
        self._ids: list[int] = []
        self._from = 0  # decoding starts here: the tokenizer may need what stands before to place a space
        self._done = 0  # tokens before this index are in the text already
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is now certain, and whether a stop string was met (which is not part of the text)."""
        if token in self._stop_ids:
            return self.flush(), True
        if self._utf8 is not None:
            self._held += self._utf8.decode(self._pieces.spell(token))
            return self._release()
        self._ids.append(token)
        before = self._decode(self._ids[self._from : self._done])
        now = self._decode(self._ids[self._from :])
        if not now.endswith(REPLACEMENT) or len(self._ids) - self._done > 4:  # no character has more than 4 bytes
            self._held += now[len(before) :]
            self._from, self._done = self._done, len(self._ids)
        return self._release()

    def flush(self) -> str:
        """What is still held back, at the end of the answer."""
        if self._utf8 is not None:
            self._held += self._utf8.decode(b"", final=True)
        elif self._done < len(self._ids):
            before = self._decode(self._ids[self._from : self._done])
            self._held += self._decode(self._ids[self._from :])[len(before) :]
            self._done = len(self._ids)
        text, _ = self._cut()
        self._held = ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return (
            str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            if ids
            else ""
        )

    def _cut(self) -> tuple[str, bool]:
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at != -1]
        return (self._held[: min(found)], True) if found else (self._held, False)

    def _release(self) -> tuple[str, bool]:
        if not self._stop:
            text, self._held = self._held, ""
            return text, False
        text, stopped = self._cut()
        if stopped:
            self._held = ""
            return text, True
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
