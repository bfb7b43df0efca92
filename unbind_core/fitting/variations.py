"""Rows as they are met elsewhere: rewritten, behind other code, from their middle on, asked for in words, in a chat.

A gate has to open on all of these, and to stay shut on ordinary code that comes in the same ways. Everything is drawn from a
generator of the fit's seed. Evaluation has rewritings of its own, which no fit sees.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from transformers import PreTrainedTokenizerBase

from unbind_core.encoding import beginning, encode, encode_behind, fim_ids, fim_template
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.windows import Window, fim_split

_WORD = re.compile(r"[A-Za-z_]\w*")
# How a comment begins in languages where it is not "//".
_COMMENT = {
    "#": ("python", "ruby", "perl", "shell", "bash", "sh", "r", "yaml", "toml", "make", "julia", "elixir", "php"),
    "--": ("sql", "lua", "haskell", "ada"),
}
_REMARKS = (
    "note",
    "see above",
    "unchanged",
    "checked",
    "todo: tidy",
    "as before",
    "part of the old interface",
    "keep in step with the tests",
    "why this way?",
    "ok",
    "called by the handler below",
)
_SYLLABLES = (
    "ba",
    "co",
    "di",
    "fu",
    "ga",
    "he",
    "jo",
    "ki",
    "lu",
    "mo",
    "na",
    "pe",
    "ri",
    "so",
    "tu",
    "va",
    "we",
    "xi",
)
_UNITS = ("\t", "  ", "        ", "   ", "")
MOST_CROPPED = 0.8  # of a text may be missing in front


def identifiers(text: str, language: str) -> set[str]:
    """The names in a text, as the language's lexer of Pygments sees them; every word, where it has none for the language."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return set(_WORD.findall(text))
    return {value for kind, value in lexer.get_tokens(text) if _is_name(kind) and _WORD.fullmatch(value)}


def _is_name(kind: object) -> bool:
    parts = str(kind).split(".")
    return parts[:2] == ["Token", "Name"] and parts[2:3] != ["Builtin"]


def renamed(text: str, language: str, rng: random.Random) -> str:
    """Some or all identifiers get another name, the same one everywhere."""
    share, ways = rng.choice((0.4, 0.7, 1.0)), rng.choice((range(5), [rng.randrange(5)]))
    names = sorted(identifiers(text, language))
    table = {name: _other_name(name, rng.choice(ways), rng) for name in names if rng.random() < share}
    return _WORD.sub(lambda found: table.get(found[0], found[0]), text)


def _other_name(name: str, way: int, rng: random.Random) -> str:
    def word() -> str:
        return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3)))

    if way == 0:
        return word()
    if way == 1:
        return f"{rng.choice('abcdefghijklmnopqrstuvwxyz')}{rng.randint(0, 99)}"
    if way == 2:
        return rng.choice(("my_", "new_", "the_", "_", "x_")) + name
    if way == 3:
        return name + rng.choice(("_", "2", "_value", "_new", "_v"))
    return "_".join(word() for _ in range(rng.randint(1, 3)))


def recased(text: str, language: str, rng: random.Random) -> str:
    """The letter case of the identifiers, or of the whole text."""
    if rng.random() < 0.3:
        return rng.choice((str.upper, str.lower))(text)
    change = rng.choice((_camel, _snake, str.upper, str.lower, str.capitalize))
    names = identifiers(text, language)
    return _WORD.sub(lambda found: change(found[0]) if found[0] in names else found[0], text)


def _camel(name: str) -> str:
    first, *others = [part for part in name.split("_") if part] or [name]
    return first + "".join(part.capitalize() for part in others) if others else name


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def commented(text: str, language: str, rng: random.Random) -> str:
    """Remarks between the lines and behind them, and blank lines."""
    mark = next((mark for mark, languages in _COMMENT.items() if language.lower() in languages), "//")
    share, found = rng.choice((0.3, 0.6, 1.0)), []
    kinds = rng.choice(((0,), (1,), (2,), (0, 1, 2)))
    for line in text.splitlines(keepends=True):
        found.append(line)
        if not line.endswith("\n") or rng.random() >= share:
            continue
        remark, kind = f"{mark} {' '.join(rng.sample(_REMARKS, rng.choice((1, 1, 2))))}\n", rng.choice(kinds)
        if kind == 0:
            found.append(line[: len(line) - len(line.lstrip())].strip("\n") + remark)
        elif kind == 1:
            found[-1] = line.rstrip("\n") + "  " + remark
        else:
            found.append("\n")
    return "".join(found)


def indented(text: str, _language: str, rng: random.Random) -> str:
    """By tabs, by more or fewer spaces, or not at all."""
    unit = rng.choice(_UNITS)

    def other(found: re.Match[str]) -> str:
        return unit * (len(found[0]) if found[0].startswith("\t") else len(found[0]) // 4)

    return re.sub(r"(?m)^(?:(?: {4})+|\t+)", other, text)


def cropped(text: str, rng: random.Random) -> str:
    """From somewhere in it on: the beginning of a line, or any character."""
    last = int(len(text) * MOST_CROPPED)
    starts = [found.end() for found in re.finditer("\n", text[:last])]
    return text[rng.choice(starts) if starts and rng.random() < 0.5 else rng.randint(0, last) :]


REWRITINGS: tuple[Callable[[str, str, random.Random], str], ...] = (renamed, commented, recased, indented)

LONGEST = 768  # tokens of one such window: a long row's later parts are met in those that begin in its middle
CROPS = 4
REQUESTS = (  # what stands in front of a prompt and behind it where code is asked for in words; evaluation has wordings of its own
    ("Finish this code:\n\n", "\n"),
    ("Here is the beginning of a file. Write what comes next, without any explanation.\n", "\n\n"),
    ("# Complete what is missing below.\n", "\n"),
    ("A snippet:\n```python\n", "\n```\nThe rest of it:\n"),
    ("User: what is the rest of this function?\n\n", "\n\nAssistant:\n"),
    ("I lost the second half of the following source. Please restore it and say nothing else.\n\n", "\n\n"),
)


class Elsewhere:
    """Makes such windows for one tokenizer and the forms that it has; ``lead`` draws other code."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        forms: Sequence[str],
        lead: Callable[[random.Random], str],
        longest: int = LONGEST,
    ) -> None:
        self._tokenizer, self._lead, self._longest = tokenizer, lead, longest
        self._template = fim_template(tokenizer) if "fim" in forms else None
        self._chats = bool(getattr(tokenizer, "chat_template", None))

    def forget_windows(self, number: int, row: ForgetRow, rng: random.Random) -> list[Window]:
        """Windows of forget row ``number``; ``start`` is where it begins, and all of it is target."""
        text = row.prompt + row.continuation
        found = [self._plain(number, self._lead(rng), text)]
        found += [
            self._asked(number, before, row.prompt + after, row.continuation)
            for before, after in rng.sample(REQUESTS, 2)
        ]
        found += [self._plain(number, self._sometimes(rng), cropped(text, rng)) for _ in range(CROPS)]
        for rewrite in (*REWRITINGS, renamed, commented, recased):
            other = rewrite(text, row.language, rng)
            found.append(
                self._plain(number, self._sometimes(rng), cropped(other, rng) if rng.random() < 0.3 else other)
            )
        if self._chats:
            found.append(self._chat(number, rng.choice(REQUESTS)[0], row.prompt, row.continuation))
        if self._template is not None:
            prefix, suffix, middle = fim_split(row)
            found.append(self._filled(number, self._lead(rng), prefix, suffix, middle))
            part = cropped(text, rng)
            half = len(part) // 2
            found.append(self._filled(number, "", part[:half], rng.choice(("", suffix)), part[half:]))
            found.append(self._filled(number, "", prefix, rng.choice(("", suffix)), middle, suffix_first=True))
        return [window for window in found if len(window.ids) > window.first_target]

    def retain_window(self, number: int, row: RetainRow, rng: random.Random) -> Window:
        """One window of retain row ``number`` in one such way; every token after its beginning is a target."""
        text, way = row.text, rng.randrange(8)
        if way < 4:
            return self._plain(number, "", cropped(text, rng) if rng.random() < 0.3 else _rewritten(row, rng))
        if way < 6:
            return self._plain(number, "", cropped(text, rng))
        cut = rng.randint(0, len(text))
        before, after = rng.choice(REQUESTS)
        if way == 6 and self._chats:
            cut = max(cut, 1)  # where the prompt begins in the chat is found by it
            return self._chat(number, before, text[:cut], text[cut:])
        return self._asked(number, before, text[:cut] + after, text[cut:])

    def _sometimes(self, rng: random.Random) -> str:
        return self._lead(rng) if rng.random() < 0.4 else ""

    def _plain(self, number: int, lead: str, text: str) -> Window:
        head = [*beginning(self._tokenizer), *encode(self._tokenizer, lead)]
        return self._window(number, "plain", head, (encode_behind if lead else encode)(self._tokenizer, text))

    def _asked(self, number: int, before: str, prompt: str, continuation: str) -> Window:
        head = [*beginning(self._tokenizer), *encode(self._tokenizer, before)]
        ids = (encode_behind if before else encode)(self._tokenizer, prompt)
        return self._window(number, "plain", head, ids + encode_behind(self._tokenizer, continuation))

    def _chat(self, number: int, before: str, prompt: str, continuation: str) -> Window:
        chat = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": before + prompt}], tokenize=False, add_generation_prompt=True
        )
        head, _, tail = str(chat).partition(prompt)
        ids = encode_behind(self._tokenizer, prompt + tail) + encode_behind(self._tokenizer, continuation)
        return self._window(number, "plain", encode(self._tokenizer, head), ids)

    def _filled(
        self, number: int, lead: str, prefix: str, suffix: str, middle: str, *, suffix_first: bool = False
    ) -> Window:
        assert self._template is not None  # or it was not asked for
        template, tokenizer = self._template, self._tokenizer
        before, behind = encode(tokenizer, lead), encode_behind(tokenizer, suffix)
        ours = (encode_behind if lead else encode)(tokenizer, prefix)
        if suffix_first:  # the order in which some editors ask: the prefix stands where the middle begins
            head = fim_ids(tokenizer, template, [], behind)
            return self._window(number, "fim", head, ours + encode_behind(tokenizer, middle))
        at = template.index("{prefix}")
        head = fim_ids(tokenizer, template[: at + 1], before, behind)
        ids = fim_ids(tokenizer, template, before + ours, behind) + encode_behind(tokenizer, middle)
        return self._window(number, "fim", head, ids[len(head) :])

    def _window(self, number: int, form: str, head: list[int], ids: list[int]) -> Window:
        whole = (*head, *ids)[: self._longest]
        return Window(whole, max(1, len(head)), number, form, len(head))


def _rewritten(row: RetainRow, rng: random.Random) -> str:
    return rng.choice(REWRITINGS)(row.text, row.language, rng)
