"""The guard at the sampler: which tokens may follow, what is withheld, and what was done.

One ``Guarding`` for each guarded request. The step asks it before a token is published; it holds no tensors.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from server.engine.forcing import Forcing
from server.engine.request import Delta, TokenLogprob, withheld_logprob
from server.engine.text import TextStream
from unbind_core.guard.book import GuardSet
from unbind_core.guard.escapes import Reading
from unbind_core.guard.follower import Follower, Verdict
from unbind_core.guard.index import GuardIndex
from unbind_core.guard.lexemes import most_lexemes
from unbind_core.guard.sent import Sent

MOST_AT_ONCE = 64  # tokens barred at one position, after which the answer ends


@dataclass(frozen=True)
class Guarded:
    """What the guards did to an answer, by guard's name: runs that were steered away from, the one that ended it, those that only
    counted theirs; the lexemes of the longest run (0: under half of what any guard allows); and which held their module's gate
    open, in the prompt or in the answer.
    """

    bars: dict[str, int] = field(default_factory=dict)
    blocked: GuardIndex | None = None
    counted: frozenset[str] = frozenset()
    longest: int = 0
    opened: frozenset[str] = frozenset()


def sent_of(prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Sent:
    """What a client sent whose prompt has these tokens."""
    return Sent(lambda: str(tokenizer.decode(list(prompt), skip_special_tokens=True)))


class Guarding:
    """Follows one answer's text, and the text that its likeliest tokens would make where log-probabilities show them."""

    def __init__(
        self,
        guards: GuardSet,
        tokenizer: PreTrainedTokenizerBase,
        prompt: tuple[int, ...],
        *,
        sent: Sent | None = None,
        cuts: bool,
        shows: bool,
        readings: Sequence[Callable[[], Reading]] = (),
        forcing: Forcing | None = None,
    ) -> None:
        """``sent``: the prompt, where several requests go on from it; see :func:`sent_of`. ``readings``: begin those in which the
        answer is followed beside its text.
        """
        sent = sent or sent_of(prompt, tokenizer)
        self._forcing = forcing
        self._answer = Follower(guards, sent, cuts=cuts)
        self._readings = self._before = [begin() for begin in readings]  # now, and before what came last
        self._beside = [Follower(guards, sent, cuts=cuts) for _ in readings]
        # what is withheld breaks this text up, so that nothing in it counts as the client's own
        self._likeliest = Follower(guards, str) if shows else None
        self._spelt = TextStream(tokenizer, (), prompt=prompt)
        self._withholds, self._cuts = guards.withholds, cuts
        # Where nobody needs to know how long runs are, text that cannot end one is read with what comes after it: between two
        # tokens the model's weights pass through the processor's caches, and looking costs four times what it costs at once.
        self._unhurried = not (guards.withholds or shows or readings)
        self._unread, self._slack = "", 0  # and how many lexemes may still be left so
        self._now: tuple[GuardIndex, ...] = ()  # whose run the text holds if it ends here
        self._bars: Counter[GuardIndex] = Counter()
        self._quiet = False
        self.barred: list[int] = []  # at the position that is being chosen
        self.blocked: GuardIndex | None = None
        self.long = False
        self.held: Delta | None = None

    def accepts(self, token: int, text: str) -> bool:
        """Whether ``token``, which adds ``text``, may follow; else it is barred, and another must be chosen, unless ``blocked``."""
        if self._slack and (lexemes := most_lexemes(text)) < self._slack:
            self._unread += text
            self._slack -= lexemes
            self._now, self.barred = (), []
            return True
        verdict = self._take(text)
        steering = next((index for index in verdict.now if index.action == "steer"), None)
        if steering is None:
            self._now = verdict.now
            self.blocked = next(iter(verdict.now if self._cuts else verdict.sure), None)
            self.long, self.barred = verdict.long or bool(verdict.now), []
            self._slack = self._answer.slack if self._unhurried else 0
            return True
        self._undo()
        if not self.barred:
            self._bars[steering] += 1
        self.barred.append(token)
        self._quiet = True
        if self._bars[steering] > steering.bars or len(self.barred) >= MOST_AT_ONCE:
            self._bars[steering] -= 1
            self.blocked = steering
        return False

    def _take(self, text: str) -> Verdict:
        self._read()
        verdict = self._answer.take(text)
        self._before, self._readings = self._readings, [reading.fork() for reading in self._readings]
        for follower, reading in zip(self._beside, self._readings, strict=True):
            verdict = verdict.and_of(follower.take(reading.take(text)))
        return verdict

    def _read(self) -> None:
        """Look at what was left unread, none of which can be the end of a run."""
        if self._unread:
            self._answer.take(self._unread)
            self._unread, self._slack = "", 0

    def _undo(self) -> None:
        for follower in (self._answer, *self._beside):
            follower.undo()
        self._readings = self._before

    def gives_up(self) -> None:
        """Nothing is left that may follow: what was barred and what the grammar forbids is all there is."""
        self.blocked = max(self._bars, key=lambda index: self._bars[index])
        self._bars[self.blocked] -= 1

    def lets(self, token: int, text: str, ends: bool) -> bool:
        """As ``accepts``, for a token that may end the answer (``ends``); true as well where nothing may follow any more."""
        if self.blocked is not None:
            return True
        if ends and not text:
            self.barred = []
            return True
        # a client sees which token of its own ended the answer, so that one is asked about as well
        return self.accepts(token, text) or self.blocked is not None

    def passed(self, delta: Delta) -> Delta | None:
        """What may be sent now that ``delta`` has come; None where it is withheld."""
        whole = delta if self.held is None else self.held.then(delta)
        self.held = whole if self._withholds and self.long else None
        return whole if self.held is None else None

    def last(self, delta: Delta) -> Delta:
        """The end of the answer: what is withheld goes with it, unless it is the end of a run. What is told of the prompt goes with
        either.
        """
        whole = delta if self.held is None else self.held.then(delta)
        if delta.finish_reason in ("stop", "length"):
            self.blocked = next(iter(self._now), None)
            delta = whole if self.blocked is None else Delta("", (), "content_filter")
        if delta.finish_reason == "content_filter":
            delta = dataclasses.replace(delta, prompt_logprobs=whole.prompt_logprobs)
        return dataclasses.replace(delta, guarded=self.outcome)

    def shown(self, entries: Iterable[TokenLogprob]) -> list[TokenLogprob]:
        """Log-probabilities as they may be told: none from a barred token on, while a run is long, or once the likeliest tokens
        hold a run themselves.
        """
        found = []
        for entry in entries:
            if self._likeliest is not None and entry.top:
                verdict = self._likeliest.take(self._spelt.push(entry.top[0][0])[0])
                self._quiet |= bool(verdict.now)
                long = verdict.long
            else:
                long = False
            found.append(withheld_logprob(entry.token) if self._quiet or self.long or long else entry)
        return found

    @property
    def outcome(self) -> Guarded:
        """What was done so far."""
        self._read()
        bars = {index.name: count for index, count in self._bars.items() if count}
        followers = (self._answer, *self._beside)
        counted = frozenset[str]().union(*(follower.counted for follower in followers))
        opened = self._forcing.names if self._forcing is not None else frozenset[str]()
        return Guarded(bars, self.blocked, counted, max(follower.longest for follower in followers), opened)
