"""What an answer must look like: a form as clients give it -> a compiled grammar -> which tokens may follow, one answer each.

Compiling is rehearsed in a process that can be ended and done on a thread of its own, so that a hostile schema holds up nobody
but others who bring new ones, and those for moments; of a key only so many wait, and keys have turns. The library leaves much of
the work to the first step of an answer, so that step belongs to compiling; its limits bound later ones.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor

from server.engine.gbnf import as_lark
from server.engine.rehearsal import Rehearsal, limits, over
from server.engine.schemas import closed

LONGEST = 65_536  # characters of a form
REMEMBERED = 64  # compiled grammars
WAITING, OWN = 32, 8  # forms that wait for their turn; of one key
SECONDS = 1.0  # of a processor, for one form
MOST_ITEMS = 50_000  # by which a form's arrays may be bounded, together: the library takes seconds to refuse more
# Symbols of a grammar. A step looks at all that may stand at one place, which who writes rules can make nearly all of them.
_WRITTEN, _OF_SCHEMAS = 10_000, 100_000
_ITEMS = re.compile(r'(?:min|max)Items\\*"\s*:\s*([0-9.eE+]+)')
_ESCAPED = re.compile(r"(?<!\\)\\+u00([0-9a-fA-F]{2})")  # begun once in a row of backslashes: there may be many
# On one line, with room for a blank where models like one: white space without end would never end an answer.
_SPACING = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}


class GrammarError(ValueError):
    """A form that cannot be compiled; the message says why."""


class GrammarsBusy(Exception):
    """Too many forms wait to be compiled."""


def check_length(characters: int) -> None:
    """Raise GrammarError where a form has too many."""
    if characters > LONGEST:
        raise GrammarError(f"has {characters} characters, and {LONGEST} are the most; send a smaller one")


@dataclass(frozen=True)
class Form:
    """What an answer must look like. ``text``: a JSON schema, a regular expression, a JSON list of texts, a grammar as llama.cpp
    (GBNF) or llguidance (Lark) write them, or one that the server wrote around schemas for ``calls``. ``lenient``: leave out the
    keywords of a schema that a grammar cannot hold.
    """

    kind: Literal["json", "regex", "choice", "grammar", "calls"]
    text: str
    lenient: bool = False

    def source(self) -> str:
        """The form as llguidance takes it. Raises GrammarError."""
        check_length(len(self.text))
        try:
            match self.kind:
                case "json":
                    return LLMatcher.grammar_from_json_schema(spaced(json.loads(self.text), self.lenient))
                case "calls":
                    return grammar_from("lark", self.text)
                case "grammar":
                    return grammar_from("lark", as_lark(self.text))
                case kind:
                    return grammar_from(kind, self.text)
        except (ValueError, TypeError, RecursionError) as error:
            raise GrammarError(f"is not understood: {str(error)[:300]}") from None


def spaced(schema: Any, lenient: bool) -> dict[str, Any]:
    """A schema with what llguidance is told of it; see ``Form.lenient``."""
    document = closed(schema) if isinstance(schema, dict) else {"allOf": [schema]}
    return {**document, "x-guidance": {**_SPACING, "lenient": lenient}}


class Constraint:
    """One answer under a grammar: which tokens may follow, and whether it is complete."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, width: int, ends: frozenset[int]) -> None:
        self._grammar, self._matcher, self._width, self._ends = grammar, matcher, width, sorted(ends)
        self.failed = ""  # why the grammar can say nothing more

    def allowed(self, *, or_end: bool = False) -> NDArray[np.bool_]:
        """By token, whether it may follow; ``or_end``: the model may end the answer whatever it lacks."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # it allows the end then, which the form may not
            self._fails()
        found = np.unpackbits(bits, count=self._width, bitorder="little").astype(np.bool_)
        if or_end:
            found[self._ends] = True
        return found

    def take(self, token: int) -> None:
        """Go on by ``token``."""
        if not self._matcher.consume_token(token):
            self._fails()

    def tried(self) -> str:
        """Why the form cannot even begin, as nothing fulfils it or its first step takes too much; empty where it can."""
        allowed = self.allowed()
        if not self.failed and not self.ended and allowed.any():
            self.take(int(allowed.argmax()))
        return "nothing fulfils it" if self.failed.startswith("NoExtension") else self.failed

    def _fails(self) -> None:
        reason = self._matcher.get_error().split("\n<")[0].strip()[:200]
        self.failed = self.failed or reason or "the answer left the grammar"
        self._grammar.spent = True

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())


def narrow(row: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Leave only what is ``allowed`` [V] in a row of logits [V], in place.

    Where ``min_tokens`` forbids all of it, as nothing but the end is left, the end stands.
    """
    mask = torch.from_numpy(allowed).to(row.device)
    row.masked_fill_(~mask, -torch.inf)
    if not row.isfinite().any():
        row.masked_fill_(mask, 0.0)


class Grammar:
    """A compiled grammar, for any number of answers of one owner. ``source`` compiles to it anywhere. ``spent``: one of them has
    failed, and with it what all of them share in the library.
    """

    def __init__(self, source: str, matcher: LLMatcher, width: int, ends: frozenset[int]) -> None:
        self.source, self.spent = source, False
        self._matcher, self._width, self._ends = matcher, width, ends

    def begin(self) -> Constraint:
        """A new answer."""
        return Constraint(self, self._matcher.deep_copy(), self._width, self._ends)


@dataclass(order=True)
class _Turn:
    """A form that waits: an owner's first one before another's second, and those of one rank as they came."""

    rank: int
    number: int
    work: Callable[[], Grammar] = field(compare=False)
    done: Future[Grammar] = field(compare=False, default_factory=Future)


def _items(source: str) -> float:
    """The sum of all ``minItems`` and ``maxItems`` in a source, however they are written."""
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), source)
    total = 0.0
    for number in _ITEMS.findall(plain):
        with suppress(ValueError):
            total += float(number)
    return total


class Grammars:
    """Compiles for one tokenizer of the fast kind, and remembers for the same owner: over owners the time that a form takes would
    tell what others ask for, and what one has used up of a grammar would end the others' answers.

    ``width``: logits of the model; ``ends``: tokens with which it ends an answer.
    """

    def __init__(self, tokenizer: Any, width: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._width, self._ends = tokenizer, width, ends
        self._known: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._lock = threading.Lock()  # of what is known, and held for moments: the event loop asks
        self._compiling = threading.Lock()
        self._wanted = Counter[str]()  # by owner, forms that wait or are compiled
        self._turns: list[_Turn] = []  # a heap of those that wait
        self._asked = 0
        self._tokens: LLTokenizer | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unbind-grammar")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="unbind-forms")
        self._room = threading.BoundedSemaphore(WAITING)
        self._rehearsal = Rehearsal(tokenizer, width, sorted(ends))

    async def compiled(self, form: Form, owner: str = "") -> Grammar:
        """The form's grammar for ``owner``, compiled off the event loop. Raises GrammarError, GrammarsBusy."""
        source = await asyncio.get_running_loop().run_in_executor(self._reading, form.source)
        if (known := self._remembered(source, owner)) is not None:
            return known
        if owner and self._wanted[owner] >= OWN:
            raise GrammarsBusy(f"{OWN} grammars of this key wait to be compiled; try again")
        if not self._room.acquire(blocking=False):
            raise GrammarsBusy("too many grammars wait to be compiled; try again")
        size = _OF_SCHEMAS if form.kind in ("json", "calls") else _WRITTEN
        with self._lock:
            turn = _Turn(self._wanted[owner], self._asked, lambda: self.of(source, size, owner=owner))
            self._wanted[owner] += 1
            self._asked += 1
            heapq.heappush(self._turns, turn)
        turn.done.add_done_callback(lambda _: self._done(owner))  # not when its client leaves: the thread has it still
        self._pool.submit(self._next)
        return await asyncio.wrap_future(turn.done)

    def _next(self) -> None:
        """Compile what is next; called once for each form."""
        with self._lock:
            turn = heapq.heappop(self._turns)
        if not turn.done.set_running_or_notify_cancel():
            return
        try:
            turn.done.set_result(turn.work())
        except BaseException as error:  # noqa: BLE001 - who waits is told
            turn.done.set_exception(error)

    def _done(self, owner: str) -> None:
        with self._lock:
            self._wanted[owner] -= 1
            self._wanted += Counter()  # forgets who wants nothing
        self._room.release()

    def of(self, source: str, size: int = _OF_SCHEMAS, seconds: float = SECONDS, owner: str = "") -> Grammar:
        """The grammar of a source for ``owner``, of at most ``size`` symbols and ``seconds`` of a processor. Raises GrammarError
        where it does not compile within the limits.
        """
        with self._compiling:
            if (known := self._remembered(source, owner)) is not None:
                return known
            made = self._compile(source, size, seconds)
        with self._lock:
            self._known[owner, source] = made
            if len(self._known) > REMEMBERED:
                (most, _), *_ = Counter(name for name, _ in self._known).most_common(1)
                del self._known[next(key for key in self._known if key[0] == most)]
        return made

    def _remembered(self, source: str, owner: str) -> Grammar | None:
        with self._lock:
            if (known := self._known.get((owner, source))) is None:
                return None
            if known.spent:
                del self._known[owner, source]
                return None
            self._known.move_to_end((owner, source))
            return known

    def load(self) -> LLTokenizer:
        """What the vocabulary spells, read on first use. Raises GrammarError for a tokenizer that tells it to nobody."""
        if self._tokens is None:
            try:
                self._tokens = from_tokenizer(self._tokenizer, self._width, sorted(self._ends))
            except (ValueError, TypeError) as error:
                raise GrammarError(f"cannot be had with this model's tokenizer: {str(error)[:200]}") from None
        return self._tokens

    def _compile(self, source: str, size: int, seconds: float) -> Grammar:
        tokens, begun = self.load(), time.thread_time()
        if (items := _items(source)) > MOST_ITEMS:
            raise GrammarError(
                f"bounds arrays by {items:g} items together, and {MOST_ITEMS} are the most; send lower bounds"
            )
        if math.isfinite(seconds) and (refusal := self._rehearsal.refused(source, size, seconds)):
            raise GrammarError(refusal)
        matcher = LLMatcher(tokens, source, log_level=0, limits=limits(size))
        if matcher.is_error():
            reason = matcher.get_error().split("\n<backtrace>")[0].strip()
            raise GrammarError(f"does not compile: {reason[:300]}")
        grammar = Grammar(source, matcher, self._width, self._ends)
        if failed := grammar.begin().tried():
            raise GrammarError(f"cannot be kept to: {failed}")
        if time.thread_time() - begun > seconds:
            raise GrammarError(over(seconds))
        return grammar

    def close(self) -> None:
        """End the threads, and the process that one of them may wait for."""
        self._rehearsal.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._reading.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = list(self._turns)
        for turn in waiting:
            turn.done.cancel()
