"""A protected row written so that it looks like something else, and spelt in whatever tokens there are for it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from server.engine.pieces import pieces_of

Disguise = Callable[[random.Random, str], str]
LONGEST = 10  # bytes of a token
_LEXEME = re.compile(r"\w+|[^\w\s]")
_CYRILLIC = str.maketrans("aceopxyABCEHKMOPTX", "асеорхуАВСЕНКМОРТХ")
_QUOTES = str.maketrans({"'": "’", '"': "“"})
_REMARKS = ("# so it was agreed", "// see above", "-- as before", "/* left as it is */", "# x", "/* a // b */")
_BETWEEN = (" ", "\n", "\t", "  \n", "\r\n", " \\\n", "\n+ ", "\n> ", "\u200b", " # aside\n", " /* aside */ ", ";")
_JUNK = ("x", "0", "_", ".", "tmp", "= 1", "é", "\u0301", "/*", "*/", "#\n", "()")


def _indented(rng: random.Random, text: str) -> str:
    by = rng.choice(("\t", "  ", " ", ""))
    return re.sub(r"(?m)^(?: {4})+", lambda spaces: by * (len(spaces[0]) // 4), text)


def _spread(rng: random.Random, text: str) -> str:
    return re.sub(r"\n", lambda _: "\n" * rng.randint(1, 3) + " " * rng.choice((0, 0, 3)), text)


def _remarked(rng: random.Random, text: str) -> str:
    return re.sub(r"\n", lambda _: f" {rng.choice(_REMARKS)}\n" if rng.random() < 0.6 else "\n", text)


def _quoted(rng: random.Random, text: str) -> str:
    sign = rng.choice(("# ", "// ", "> ", "+ ", "| ", "* ", "-- "))
    return sign + text.replace("\n", "\n" + sign)


def _boxed(rng: random.Random, text: str) -> str:
    return rng.choice(("/*", "/* a /*", "//", "# ")) + text + rng.choice(("*/", "", "\n*/"))


def _parted(rng: random.Random, text: str) -> str:
    often = rng.choice((0.1, 0.5, 1.0))
    return _LEXEME.sub(lambda found: found[0] + (rng.choice(_BETWEEN) if rng.random() < often else ""), text)


def _alike(rng: random.Random, text: str) -> str:
    often = rng.choice((0.2, 1.0))
    return "".join(c.translate(_CYRILLIC) if rng.random() < often else c for c in text)


def _wide(rng: random.Random, text: str) -> str:
    often = rng.choice((0.1, 1.0))
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" and rng.random() < often else c for c in text)


def _marked(rng: random.Random, text: str) -> str:
    mark = rng.choice(("\u0301", "\u200b", "\u00ad", "\ufe0f"))
    return "".join(c + mark if c.isalpha() and rng.random() < 0.2 else c for c in text)


def _littered(rng: random.Random, text: str) -> str:
    often = rng.choice((0.02, 0.06, 0.12))
    return _LEXEME.sub(lambda found: found[0] + (f" {rng.choice(_JUNK)} " if rng.random() < often else ""), text)


def _as_json(_: random.Random, text: str) -> str:
    return json.dumps(text)[1:-1]


DISGUISES: Mapping[str, Disguise] = {
    "none": lambda _, text: text,
    "indented": _indented,
    "spread": _spread,
    "remarked": _remarked,
    "quoted": _quoted,
    "boxed": _boxed,
    "parted": _parted,
    "alike": _alike,
    "wide": _wide,
    "marked": _marked,
    "quotes": lambda _, text: text.translate(_QUOTES),
    "one line": lambda _, text: text.replace("\n", " "),
    "littered": _littered,
    "a string of JSON": _as_json,
}
_WEIGHTS = [3, *[1] * (len(DISGUISES) - 1)]


def written(rng: random.Random, row: str, most: int) -> str:
    """So many characters of the row from anywhere on, in up to three disguises on top of each other."""
    start = rng.randrange(len(row) // 2) if rng.random() < 0.5 else 0
    text = row[start : start + most]
    for disguise in rng.choices(list(DISGUISES.values()), _WEIGHTS, k=rng.choice((1, 1, 2, 3))):
        text = disguise(rng, text)
    return text


class Spelling:
    """A tokenizer's tokens by the bytes that they stand for, to spell a text in more ways than the tokenizer would."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        pieces = pieces_of(tokenizer)
        self.bytes = [pieces.spell(token) for token in range(len(tokenizer))]
        self._tokens = {piece: token for token, piece in enumerate(self.bytes) if piece and len(piece) <= LONGEST}

    def beginnings(self, text: bytes, at: int) -> list[int]:
        """Every token that ``text`` from ``at`` on begins with, the longest last."""
        known, most = self._tokens, min(len(text), at + LONGEST) + 1
        return [known[piece] for end in range(at + 1, most) if (piece := text[at:end]) in known]

    def token(self, text: str) -> int:
        """The token that is exactly this text, or its first byte's."""
        piece = text.encode()
        return self._tokens.get(piece, self._tokens[piece[:1]])

    def spelt(self, rng: random.Random, text: str, shortest: float = 0.2) -> list[int]:
        """The text in tokens drawn at random: mostly the longest that fit."""
        whole, at, found = text.encode(), 0, []
        while at < len(whole):
            ways = self.beginnings(whole, at)
            found.append(rng.choice(ways) if rng.random() < shortest else ways[-1])
            at += len(self.bytes[found[-1]])
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens stand for together."""
        return b"".join(self.bytes[token] for token in tokens).decode("utf-8", "replace")
