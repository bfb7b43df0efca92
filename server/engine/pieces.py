"""What a tokenizer's tokens spell, known once for all requests: bytes of each token, and which ones are special.

For byte-level vocabularies (nearly all code models) text is the tokens' bytes in a row, so a stream need not ask the
tokenizer to decode the same surroundings at every token.
"""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase


class Pieces:
    """One tokenizer's vocabulary, filled in as tokens appear."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder
        self.by_text = {token.content: index for index, token in added.items()}
        self.byte_level = _is_byte_level(tokenizer)
        self._tokenizer = tokenizer
        self.special = frozenset(index for index, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = dict.fromkeys(self.special, b"")

    def spell(self, token: int) -> bytes:
        """The token's bytes, none for a special token; for byte-level vocabularies only."""
        found = self._bytes.get(token)
        if found is None:
            text: Any = self._tokenizer.convert_ids_to_tokens(token) or ""
            whole = all(character in BYTE_OF for character in text)  # else the token is plain text that was added
            found = bytes(BYTE_OF[character] for character in text) if whole else str(text).encode()
            self._bytes[token] = found
        return found


_known: WeakKeyDictionary[PreTrainedTokenizerBase, Pieces] = WeakKeyDictionary()


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """The tokenizer's pieces, made on first use."""
    if tokenizer not in _known:
        _known[tokenizer] = Pieces(tokenizer)
    return _known[tokenizer]


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decoding is joining bytes and nothing else."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"


def _alphabet() -> dict[str, int]:
    """Character -> byte, as byte-level vocabularies write it: printable ones as themselves, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _alphabet()
