"""Windows of rows as they are met elsewhere: behind other code, from their middle on, rewritten, asked for in words, in a chat.

A gate has to open on all of these, and to stay shut on ordinary code that comes in the same ways.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from unbind_core.encoding import beginning, encode, fim_ids, fim_template
from unbind_core.fitting.variations import REWRITINGS, commented, cropped, recased, renamed
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.windows import Window, fim_split

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
        self, tokenizer: PreTrainedTokenizerBase, forms: Sequence[str], lead: Callable[[random.Random], str]
    ) -> None:
        self._tokenizer, self._lead = tokenizer, lead
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
            return self._chat(number, before, text[:cut], text[cut:])
        return self._asked(number, before, text[:cut] + after, text[cut:])

    def _sometimes(self, rng: random.Random) -> str:
        return self._lead(rng) if rng.random() < 0.4 else ""

    def _plain(self, number: int, lead: str, text: str) -> Window:
        head = [*beginning(self._tokenizer), *encode(self._tokenizer, lead)]
        return _window(number, "plain", head, encode(self._tokenizer, text))

    def _asked(self, number: int, before: str, prompt: str, continuation: str) -> Window:
        head = [*beginning(self._tokenizer), *encode(self._tokenizer, before)]
        return _window(number, "plain", head, encode(self._tokenizer, prompt) + encode(self._tokenizer, continuation))

    def _chat(self, number: int, before: str, prompt: str, continuation: str) -> Window:
        chat = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": before + prompt}], tokenize=False, add_generation_prompt=True
        )
        head, _, tail = str(chat).partition(prompt)
        ids = encode(self._tokenizer, prompt + tail) + encode(self._tokenizer, continuation)
        return _window(number, "plain", encode(self._tokenizer, head), ids)

    def _filled(
        self, number: int, lead: str, prefix: str, suffix: str, middle: str, *, suffix_first: bool = False
    ) -> Window:
        assert self._template is not None  # or it was not asked for
        template, tokenizer = self._template, self._tokenizer
        before, ours, behind = (encode(tokenizer, text) for text in (lead, prefix, suffix))
        if suffix_first:  # the order in which some editors ask: the prefix stands where the middle begins
            head = fim_ids(tokenizer, template, [], behind)
            return _window(number, "fim", head, ours + encode(tokenizer, middle))
        at = template.index("{prefix}")
        head = fim_ids(tokenizer, template[: at + 1], before, behind)
        ids = fim_ids(tokenizer, template, before + ours, behind) + encode(tokenizer, middle)
        return _window(number, "fim", head, ids[len(head) :])


def _rewritten(row: RetainRow, rng: random.Random) -> str:
    return rng.choice(REWRITINGS)(row.text, row.language, rng)


def _window(number: int, form: str, head: list[int], ids: list[int]) -> Window:
    whole = (*head, *ids)[:LONGEST]
    return Window(whole, max(1, len(head)), number, form, len(head))
