"""The normal form in which the guard compares code of any language: lexemes, and two readings of every text.

A lexeme is a word (letters, digits and ``_``) or one punctuation character. White space, line ends, control characters, accents and
invisible characters mean nothing; letters and quotes that look alike are the same. ``# / * -`` mean nothing, as comments are made
of them, nor do ``+ > |``, which quotations and patches put before lines, and ``; \\``, which may stand at the end of any.
A line end or a tab that is written as ``\\n``, ``\\r`` or ``\\t`` is one, so that a text is the same as a string of JSON.

The reading *all* counts what comments say, so code that is commented out is still there. The reading *code* leaves comments out:
``#``, ``//`` and ``--`` to the end of the line, and ``/* */``, which is one only once it is closed. No language is asked for:
what is no comment in its own language is left out of *code* all the same, in what is protected and in what is compared with it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

_PARTS = re.compile(r"\w+|\n|\\[nrt]|//|/\*|\*/|--|[^\w\s]")
_WORD = re.compile(r"\w*")
_SIGNS = frozenset("#/*-+>|;\\") | {"//", "/*", "*/", "--", r"\t"}
_ENDS = frozenset({"\n", r"\n", r"\r"})  # of a line, also as a string in JSON writes them
_LINE_COMMENTS = frozenset({"#", "//", "--"})
_GROWING = frozenset("/*-\\")  # what may become a longer sign with the next character
_LINE_ENDS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_QUOTES = "'\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u2032\u2033\u00ab\u00bb\u2039\u203a\u02bc"
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_LOOK_ALIKE = (
    str.maketrans(
        "АВЕКМНОРСТУХІЈЅҮаеорсухіјѕһԁԛԝΑΒΕΖΗΙΚΜΝΟΡΤΥΧοινρı",  # Cyrillic and Greek
        "ABEKMHOPCTYXIJSYaeopcyxijshdqwABEZHIKMNOPTYXoivpi",
    )
    | dict.fromkeys(map(ord, _QUOTES), ord('"'))
    | dict.fromkeys(map(ord, _DASHES), ord("-"))
)
_REMEMBERED = 20_000  # characters
_MOST_LETTERS = 18  # that one character is read as
_INVISIBLE = frozenset({"Mn", "Me", "Cf", "Cc", "Cn", "Co", "Cs"})
_BLANK = frozenset("\u115f\u1160\u2800\ufffc\ufffd")  # letters and signs that show nothing, and what stands for none


class _Plain(dict[int, str]):
    """What each character is read as, by code point, filled in as characters appear."""

    def __missing__(self, point: int) -> str:
        letters = unicodedata.normalize("NFKD", chr(point)).translate(_LOOK_ALIKE)
        read = "".join(
            letter for letter in letters if letter not in _BLANK and unicodedata.category(letter) not in _INVISIBLE
        )
        if len(self) < _REMEMBERED:
            self[point] = read
        return read


_PLAIN = _Plain(
    {ord(character): "\n" for character in _LINE_ENDS} | {ord(character): character for character in "\t\n "}
)


def parts(pending: str, text: str) -> tuple[list[str], str]:
    """Words, punctuation, comment signs and line ends of ``pending`` and ``text``, and the end that more text may change."""
    plain = text.translate(_PLAIN)
    if pending and is_word(pending) and _WORD.fullmatch(plain):
        return [], pending + plain  # a long word that is read anew with each part of it takes the square of its length
    whole = pending + plain
    found = list(_PARTS.finditer(whole))
    if found and found[-1].end() == len(whole) and (is_word(found[-1][0]) or found[-1][0] in _GROWING):
        return [part[0] for part in found[:-1]], found[-1][0]
    return [part[0] for part in found], ""


def spelt(text: str) -> str:
    """Its letters and digits, each a word of its own: what a guard of secrets reads. One may stand in any word, and be broken up by
    any sign.
    """
    return "".join(f"{letter} " for letter in text.translate(_PLAIN) if letter.isalnum())


def most_lexemes(text: str) -> int:
    """As many lexemes as ``text`` can begin at most, told at a glance: its characters, or one where it is a word."""
    bare = text.strip()
    if bare.isascii():
        return 1 if bare.isidentifier() else len(bare)
    return _MOST_LETTERS * len(bare)


def is_word(part: str) -> bool:
    """Whether a part is a word, and not punctuation, a sign or a line end."""
    return part[0] == "_" or part[0].isalnum()


class Seen(Enum):
    """What a part of the text is to the two readings."""

    NOTHING = auto()
    IN_COMMENT = auto()  # a lexeme of *all* alone
    LEXEME = auto()  # of both
    OPENS = auto()  # ``/*``: what follows counts in *code* until it is closed
    CLOSES = auto()  # ``*/``: *code* is again what it was at the newest ``/*``


class Comments:
    """Where a text stands among its comments; ``see`` each of its parts in order."""

    __slots__ = ("line", "open")

    def __init__(self, line: bool = False, open: bool = False) -> None:
        self.line, self.open = line, open

    def see(self, part: str) -> Seen:
        """What the next part is."""
        if part in _ENDS:
            self.line = False
        elif part == "*/" and self.open:
            self.line = self.open = False
            return Seen.CLOSES
        elif part == "/*" and not self.line:
            self.open = True
            return Seen.OPENS
        elif part in _LINE_COMMENTS:
            self.line = True
        elif part not in _SIGNS:
            return Seen.IN_COMMENT if self.line else Seen.LEXEME
        return Seen.NOTHING


class Place(NamedTuple):
    """A lexeme and where it stands: ``text[start:end]``, before it was put into its normal form."""

    lexeme: str
    start: int
    end: int


def readings(text: str) -> tuple[list[str], list[str]]:
    """The lexemes of a whole text: *all*, and *code*."""
    found = [part[0] for part in _PARTS.finditer(text.translate(_PLAIN))]
    everything, code = _read(found)
    return [found[at] for at in everything], [found[at] for at in code]


def placed_readings(text: str) -> tuple[list[Place], list[Place]]:
    """As ``readings``, each lexeme with its place."""
    plain = [character.translate(_PLAIN) for character in text]
    origin = [at for at, letters in enumerate(plain) for _ in letters]
    found = [
        Place(part[0], origin[part.start()], origin[part.end() - 1] + 1) for part in _PARTS.finditer("".join(plain))
    ]
    everything, code = _read([place.lexeme for place in found])
    return [found[at] for at in everything], [found[at] for at in code]


def placed_letters(text: str) -> list[Place]:
    """The lexemes of ``spelt`` of a whole text, each with its place in it."""
    return [
        Place(letter, at, at + 1)
        for at, character in enumerate(text)
        for letter in character.translate(_PLAIN)
        if letter.isalnum()
    ]


def _read(found: Sequence[str]) -> tuple[list[int], list[int]]:
    """Which of the parts of a whole text are lexemes: of *all*, and of *code*."""
    comments, opened = Comments(), 0
    everything: list[int] = []
    code: list[int] = []
    for at, part in enumerate(found):
        seen = comments.see(part)
        if seen in (Seen.LEXEME, Seen.IN_COMMENT):
            everything.append(at)
        if seen is Seen.LEXEME:
            code.append(at)
        elif seen is Seen.OPENS:
            opened = len(code)
        elif seen is Seen.CLOSES:
            del code[opened:]
    return everything, code


def folded(lexemes: Sequence[str]) -> list[str]:
    """The same with each name as how far back it stood before, so that consistent renaming changes nothing (Baker, 1993).

    Words that begin with a digit and the keywords of common languages stay as they are.
    """
    last: dict[str, int] = {}
    found = []
    for index, lexeme in enumerate(lexemes):
        if lexeme in _KEYWORDS or not lexeme[0].isidentifier():
            found.append(lexeme)
        else:
            found.append(f"\x01{index - last[lexeme]}" if lexeme in last else "\x01")
            last[lexeme] = index
    return found


_KEYWORD_TEXT = """
False None True and as assert async await break class continue def del elif else except finally for from global if import in is
lambda nonlocal not or pass raise return try while with yield match case self cls abstract boolean byte catch char const default
do double enum export extends final float function goto implements instanceof int interface let long native new null package
private protected public short static strictfp super switch synchronized this throw throws transient typeof undefined var void
volatile auto bool delete explicit extern false friend inline mutable namespace operator register reinterpret_cast signed sizeof
static_cast struct template true typedef typename union unsigned using virtual chan defer fallthrough func go map range select
type begin end elsif ensure module nil redo rescue retry then undef unless until when fn impl loop mod move mut pub ref trait
unsafe use where dyn crate echo elseif endif foreach include isset require print string object val fun
"""
_KEYWORDS = frozenset(_KEYWORD_TEXT.split())
