"""Where a takedown's guard moves its module's gate: behind a stretch of a protected row, whoever wrote it, it is open, and
behind a shorter one in the prompt it opens more easily.

A detector may miss a row that is met from its middle, between comments, or among very many; what a guard finds it finds always.
One ``Forcing`` for each request that both apply to; it reads prompt and answer as one text and holds no tensors.
"""

from __future__ import annotations

import itertools
from codecs import getincrementaldecoder
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from server.engine.pieces import pieces_of
from server.engine.request import GenerationRequest
from server.engine.text import REPLACEMENT, TextStream
from unbind_core.applying.passes import END, Forced
from unbind_core.guard.book import GuardSet
from unbind_core.guard.follower import Follower
from unbind_core.guard.index import GuardIndex, Stretch
from unbind_core.guard.lexemes import most_lexemes

PIECE = 16  # tokens of a prompt that are read at a time; a gate opens at the last of them
UNREAD = 4  # lexemes of an answer that are left until there are so many: looking at each costs more
LEAST = 32  # positions that a gate is held open for
MOST = 8  # times in an answer that one is; then it stays open, as under vLLM what follows is asked for anew each time


class _Gate(NamedTuple):
    """A module's: its name in the bank, for how many ``positions`` it is moved, and whether it closes at another score than the one
    that opens it.
    """

    name: str
    positions: int
    eases: bool


class Forcing:
    """Where gates are open in one request's prompt and, as far as it has come, in its answer."""

    def __init__(
        self,
        request: GenerationRequest,
        guards: GuardSet,
        gates: Mapping[GuardIndex, _Gate],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """``gates``: see :meth:`of`."""
        self._follower, self._gates = Follower(guards, str, marks=True), gates
        self._text = TextStream(tokenizer, (), shown=request.shown, prompt=request.prompt)
        # Its last word counts as it stands there, and as far as the answer goes on with it.
        end = (len(request.prompt) - 1, " ")
        self._prompt: Iterable[tuple[int, str]] = itertools.chain(_read(request.prompt, tokenizer), (end,))
        self._unread, self._lexemes = "", 0
        self._spans: tuple[Forced, ...] = ()
        self._ends: dict[str, int] = {}  # up to where each gate is held open
        self._times = 0  # in the answer
        # How many tokens of the prompt every longer one reads in the same pieces. What is found behind these hangs on where this
        # one ends, or on its answer. So nothing of that is taken over: by how much is, a client could tell what was found.
        self.settled = (len(request.prompt) - 1) // PIECE * PIECE

    @classmethod
    def of(cls, request: GenerationRequest, tokenizer: PreTrainedTokenizerBase) -> Forcing | None:
        """Of a request; None where no guard that acts stands beside a module that does, and for a canary, which asks whether the
        detector is at work.
        """
        if request.guards is None or request.internal:
            return None
        strengths = request.modules.strengths
        acting = {entry.module.name: entry for entry in request.modules.entries if strengths[entry.key] > 0}
        gates = {}
        for index in sorted(request.guards.acting, key=lambda index: index.name):
            if index.stretches and (entry := acting.get(index.name)) is not None:
                module = entry.module  # as many positions as the gate looks back where it closes
                count = max(LEAST, module.hold or module.window)
                gates[index] = _Gate(entry.key, count, module.tau_close not in (None, module.tau))
        return cls(request, request.guards, gates, tokenizer) if gates else None

    @property
    def spans(self) -> tuple[Forced, ...]:
        """What is known so far, in order of its beginnings. The prompt is read when somebody first asks: microseconds a token."""
        if self._prompt:
            self._read_prompt()
        return self._spans

    @property
    def names(self) -> frozenset[str]:
        """The guards, which are named as their modules, that have held a gate open."""
        return frozenset(index.name for index, gate in self._gates.items() if gate.name in self._ends)

    def take(self, token: int, position: int) -> None:
        """Go on by a token of the answer, which stands at ``position``."""
        text, _ = self._text.push(token)
        self._unread += text
        self._lexemes += most_lexemes(text)
        if self._lexemes >= UNREAD:
            before = len(self.spans)
            self._look(self._unread, position, self._times >= MOST)
            self._times += len(self._spans) > before
            self._unread, self._lexemes = "", 0

    def _read_prompt(self) -> None:
        """What all guards are asked at once: each lexeme of each of them would take a thousand times as long under a thousand."""
        pieces: dict[Stretch, dict[int, list[int]]] = {}  # by the run that a stretch ends with those in which it does
        for last, text in self._prompt:
            self._follower.take(text)
            for stretch, run in self._follower.met:
                pieces.setdefault(stretch, {}).setdefault(run, []).append(last)
        self._prompt = ()
        self._follower.undo()
        spans: list[Forced] = []
        for holds in (True, False):
            met = [(kind, np.array(sorted(ended), np.uint64)) for kind, ended in pieces.items() if kind.holds is holds]
            known: dict[tuple[Hashable, ...], list[tuple[int, int]]] = {}  # many guards may share what is met
            for index, (name, count, eases) in self._gates.items() if met else ():
                if not (eases or holds):
                    continue
                found = [index.among(kind, runs) for kind, runs in met]
                key = (count, *map(tuple, found))
                if key not in known:
                    ends = (pieces[kind][run] for (kind, _), own in zip(met, found, strict=True) for run in own)
                    known[key] = _joined(set(itertools.chain.from_iterable(ends)), count)
                spans += (Forced(name, *span, not holds) for span in known[key])
                if holds and known[key]:
                    self._ends[name] = known[key][-1][1]
        self._spans = tuple(sorted(spans, key=lambda span: (span.start, span.name, span.eased)))

    def _look(self, text: str, position: int, for_good: bool = False) -> None:
        self._follower.take(text)
        met = [one for one in self._follower.met if one[0].holds]
        for index, (name, count, _) in self._gates.items() if met else ():
            if position >= self._ends.get(name, 0) and any(index.ends(*one) for one in met):
                self._ends[name] = END if for_good else position + count
                self._spans = (*self._spans, Forced(name, position, self._ends[name]))


def _joined(positions: Iterable[int], count: int) -> list[tuple[int, int]]:
    """From each of ``positions`` on ``count`` of them, as spans that do not meet."""
    spans: list[tuple[int, int]] = []
    for position in sorted(positions):
        start = spans.pop()[0] if spans and position <= spans[-1][1] else position
        spans.append((start, position + count))
    return spans


def _read(prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, str]]:
    """The text of a prompt in pieces, each with the position of its last token."""
    pieces = pieces_of(tokenizer)
    utf8 = getincrementaldecoder("utf-8")("replace")

    def decoded(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)) if ids else ""

    before: list[int] = []  # whole characters, as the tokenizer may need them to place a space
    left: list[int] = []  # what is unread
    for start in range(0, len(prompt), PIECE):
        some = prompt[start : start + PIECE]
        if pieces.byte_level:
            text = utf8.decode(b"".join(map(pieces.spell, some)))
        else:
            left += (token for token in some if token not in pieces.special)
            ends = range(len(left), max(len(left) - 4, 0), -1)  # no character has more than 4 bytes
            found = (end for end in ends if not decoded([*before, *left[:end]]).endswith(REPLACEMENT))
            whole = next(found, len(left) if len(left) >= 4 else 0)
            text = decoded([*before, *left[:whole]])[len(decoded(before)) :]
            before, left = left[:whole] or before, left[whole:]
        yield start + len(some) - 1, text
