"""Whether a text holds a protected run, found the slow and plain way: the judge of the guard, which shares no code with it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from hypothesis import strategies as st


def _written_out(text: str) -> str:
    text = "".join(one for one in text if one.isprintable() or one.isspace())
    for letter in "nr":
        text = text.replace(f"\\{letter}", "\n")
    return text.replace("\\t", " ")


def _strip_comments(text: str) -> str:
    """Without comments: character by character, ``/*`` remembered, ``*/`` cutting back to the newest one."""
    text = _written_out(text)
    out: list[str] = []
    opened = -1
    at = 0
    in_line = False
    while at < len(text):
        two = text[at : at + 2]
        if text[at] == "\n":
            in_line = False
            out.append("\n")
            at += 1
        elif two == "*/" and opened >= 0:
            del out[opened:]
            opened, in_line = -1, False
            out.append(" ")
            at += 2
        elif two == "/*":
            if not in_line:
                opened = len(out)
                out.append(" ")
            at += 2
        elif two in ("//", "--") or text[at] == "#":
            in_line = True
            out.append(" ")
            at += 1 if text[at] == "#" else 2
        elif two == "*/":
            out.append(" ")
            at += 2
        else:
            if not in_line:
                out.append(text[at])
            at += 1
    return "".join(out)


def words(text: str) -> list[str]:
    """Words and punctuation of an ASCII text (or one in accents), without the signs of comments."""
    text = _written_out(text)
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    found = []
    word = ""
    for character in ascii_text.replace("'", '"') + " ":
        if character.isalnum() or character == "_":
            word += character
            continue
        if word:
            found.append(word)
            word = ""
        if not character.isspace() and character.isprintable() and character not in "#/*-+>|;\\":
            found.append(character)
    return found


def _readings(text: str) -> list[list[str]]:
    return [words(text), words(_strip_comments(text))]


def longest_run(answer: str, rows: Sequence[str]) -> int:
    """The most lexemes in a row that ``answer``, in either reading, shares with one of ``rows``, in either reading. Quadratic."""
    best = 0
    protected = [reading for row in rows for reading in _readings(row)]
    for said in _readings(answer):
        for kept in protected:
            lengths = [0] * (len(kept) + 1)
            for lexeme in said:
                lengths = [
                    0,
                    *(lengths[i] + 1 if lexeme == other else 0 for i, other in enumerate(kept)),
                ]
                best = max(best, *lengths)
    return best


@st.composite
def scraps(draw: st.DrawFn, rows: Sequence[str], junk: Sequence[str], most: int = 120) -> str:
    """Parts of the rows, of up to ``most`` characters, with junk between them."""
    made = []
    for _ in range(draw(st.integers(1, 5))):
        row = draw(st.sampled_from(rows))
        start = draw(st.integers(0, len(row) - 1))
        made.append(row[start : start + draw(st.integers(0, most))])
        made += draw(st.lists(st.sampled_from(junk), max_size=4))
    return "".join(made)
