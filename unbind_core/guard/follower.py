"""Follows one answer and says, piece by piece, whether it holds a run that a guard protects.

A violation is a run of N lexemes of a protected row, in a reading of the answer, no lexeme of which lies in a stretch of N/2 or
more that stands in the prompt as well: what the client sent itself may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from unbind_core.guard.book import Group, GuardSet
from unbind_core.guard.index import GuardIndex, Shape, Stretch
from unbind_core.guard.lexemes import Comments, Seen, is_word, parts, spelt
from unbind_core.guard.sent import Sent


class Verdict(NamedTuple):
    """``sure``: the guards that act and whose run the text holds; ``now``: those whose run it holds if it ends here, perhaps in the
    middle of a word. ``counted``: those that only count, likewise. ``long``: whether a run of more than N/2 lexemes goes on, of a
    guard that acts.
    """

    sure: tuple[GuardIndex, ...] = ()
    now: tuple[GuardIndex, ...] = ()
    counted: tuple[GuardIndex, ...] = ()
    long: bool = False

    def and_of(self, other: Verdict) -> Verdict:
        """What is said of a text that is read in two ways."""
        if other is _NOTHING:
            return self
        sure, now, counted = (
            tuple(dict.fromkeys(mine + yours)) for mine, yours in zip(self[:3], other[:3], strict=True)
        )
        return Verdict(sure, now, counted, self.long or other.long)


class _Trace(NamedTuple):
    """One reading of the answer, as far as it matters: its newest lexemes, and for each group for how many lexemes now runs of N/2
    have ended at each (``streaks``), and how many lexemes have come since the client's own text ended (``fresh``, at most N).
    """

    recent: tuple[str, ...]
    streaks: tuple[int, ...]
    fresh: tuple[int, ...]


class _State(NamedTuple):
    everything: _Trace
    code: _Trace
    outside: _Trace  # *code* at the newest ``/*``
    pending: str = ""
    line: bool = False
    open: bool = False


_NOTHING = Verdict()


class Follower:
    """One answer under ``guards``. ``prompt`` is what the client sent, or gives it, and is asked once, if at all.

    ``cuts``: whether the text may be cut anywhere (by a stop string), so that the beginning of a word is a lexeme as well.
    ``marks``: whether it only tells of stretches that move gates, whoever sent them, and of no run.
    """

    def __init__(
        self,
        guards: GuardSet,
        prompt: Sent | Callable[[], str],
        *,
        cuts: bool = False,
        marks: bool = False,
        letters: bool = False,
    ) -> None:
        """``letters``: it is given what is ``spelt``, for guards of secrets alone. For others one is made and asked as well."""
        self.guards = guards
        self.met: list[tuple[Stretch, int]] = []  # with their last runs: of any guard, ended in the newest ``take``
        self._longest, self._counted = 0, frozenset[str]()
        self._prompt = prompt if isinstance(prompt, Sent) else Sent(prompt)
        self._cuts, self._marks, self._spelt = cuts, marks, letters
        self._groups = tuple(group for group in guards.groups if group.shape.secrets is letters)
        self._letters: Follower | None = None
        if not (letters or marks) and len(self._groups) < len(guards.groups):
            self._letters = Follower(guards, self._prompt, letters=True)
        found = guards.stretches if marks else self._groups
        self._shapes = tuple(group.shape for group in found)
        self._keep = max((shape.run for shape in self._shapes), default=1) - 1
        nothing = _Trace((), (0,) * len(self._shapes), tuple(shape.run for shape in self._shapes))
        self._state = _State(nothing, nothing, nothing)
        self._before = self._state, self._longest, self._counted

    def take(self, text: str) -> Verdict:
        """Go on by ``text``."""
        verdict = self._take(text) if self._shapes else _NOTHING
        return verdict if self._letters is None else verdict.and_of(self._letters.take(spelt(text)))

    @property
    def longest(self) -> int:
        """Lexemes, or characters of a secret, of the longest run so far; 0 while it is under N/2."""
        return self._longest if self._letters is None else max(self._longest, self._letters.longest)

    @property
    def counted(self) -> frozenset[str]:
        """Guards that only count and whose run the answer has held."""
        return self._counted if self._letters is None else self._counted | self._letters.counted

    def _take(self, text: str) -> Verdict:
        state = self._state
        self._before = state, self._longest, self._counted
        self.met = []
        found, pending = parts(state.pending, text)
        comments = Comments(state.line, state.open)
        everything, code, outside = state.everything, state.code, state.outside
        hits: list[GuardIndex] = []
        cuts: list[GuardIndex] = []
        # Letters of the first word, whose beginnings were asked about as they came; of what is no word they were not.
        asked = len(state.pending) if state.pending and is_word(state.pending) else 0
        for part in found:
            seen = comments.see(part)
            if seen is Seen.OPENS:
                outside = code
            elif seen is Seen.CLOSES:
                code = outside
            elif seen is not Seen.NOTHING:
                if self._cuts and (any(everything.streaks) or any(code.streaks)):
                    cuts += self._beginnings(everything, part, asked)
                    cuts += self._beginnings(code, part, asked) if seen is Seen.LEXEME else ()
                same = seen is Seen.LEXEME and (everything is code or everything == code)
                everything = self._next(everything, part, hits)
                code = everything if same else self._next(code, part, hits) if seen is Seen.LEXEME else code
            asked = 0
        self._state = _State(everything, code, outside, pending, comments.line, comments.open)
        if self._marks:
            return _NOTHING
        if not (any(everything.streaks) or any(code.streaks)):
            return self._verdict(hits, cuts, False) if hits or cuts else _NOTHING
        if pending and is_word(pending):
            cuts += self._beginnings(everything, pending, asked, whole=True)
            cuts += self._beginnings(code, pending, asked, whole=True) if not comments.line else ()
        long = self._long(everything) or (code is not everything and self._long(code))
        if not hits and not cuts:
            return Verdict(long=True) if long else _NOTHING
        return self._verdict(hits, cuts, long)

    @property
    def slack(self) -> int:
        """With fewer new lexemes than this no run comes to its end; a word that has begun is not among them. None of a secret's
        letters may be left.
        """
        if self._letters is not None:
            return 0
        traces = (self._state.everything, self._state.code, self._state.outside)
        return min(
            shape.run - shape.half - streak
            for trace in traces
            for shape, streak in zip(self._shapes, trace.streaks, strict=True)
        )

    def undo(self) -> None:
        """Take back the newest ``take``; once."""
        self._state, self._longest, self._counted = self._before
        if self._letters is not None:
            self._letters.undo()

    def _lengths(self, trace: _Trace) -> Iterable[tuple[Group, int, int]]:
        return zip(self._groups, trace.streaks, trace.fresh, strict=True)

    def _long(self, trace: _Trace) -> bool:
        found = self._lengths(trace)
        return any(group.acts and _length(group.shape, *length) > group.shape.half for group, *length in found)

    def _verdict(self, hits: list[GuardIndex], cuts: list[GuardIndex], long: bool) -> Verdict:
        acting = self.guards.acting
        sure = tuple(dict.fromkeys(index for index in hits if index in acting))
        now = tuple(dict.fromkeys((*sure, *(index for index in cuts if index in acting))))
        counted = tuple(dict.fromkeys(index for index in hits if index not in acting))
        self._counted |= {index.name for index in counted}
        return Verdict(sure, now, counted, long)

    def _next(self, trace: _Trace, lexeme: str, hits: list[GuardIndex]) -> _Trace:
        """The trace after one more lexeme; guards whose run it completes go to ``hits``."""
        if self._marks:
            return self._marked(trace, lexeme)
        recent = (*trace.recent, lexeme)
        streaks, freshes = [], []
        for group, before, sent in self._lengths(trace):
            shape = group.shape
            streak, fresh = 0, min(sent + 1, shape.run)
            if len(recent) >= shape.half:
                half = shape.fingerprint(recent[-shape.half :], self.guards.secret)
                if group.holds(half):
                    streak = before + 1
                    fresh = 0 if self._sent(shape, recent, half) else fresh
                    self._longest = max(self._longest, _length(shape, streak, fresh))
            if streak > shape.run - shape.half and fresh == shape.run:
                hits += self._holders(group, recent[-shape.run :])
            streaks.append(streak)
            freshes.append(fresh)
        return _Trace(recent[-self._keep :], tuple(streaks), tuple(freshes))

    def _marked(self, trace: _Trace, lexeme: str) -> _Trace:
        recent = (*trace.recent, lexeme)
        streaks = []
        for kind, before in zip(self.guards.stretches, trace.streaks, strict=True):
            half, streak = kind.shape.half, 0
            if len(recent) >= half:
                run = kind.shape.fingerprint(recent[-half:], self.guards.secret)
                if run in kind.runs:
                    streak = before + 1
                    self.met += [(kind.stretch, run)] if streak + half > kind.stretch.least else ()
            streaks.append(streak)
        return _Trace(recent[-self._keep :], tuple(streaks), trace.fresh)

    def _beginnings(self, trace: _Trace, word: str, asked: int, *, whole: bool = False) -> list[GuardIndex]:
        """Guards whose run is complete if the answer is cut within ``word``, or ends with the ``whole`` of it; as for cuts within
        its first letters, so many were ``asked`` about.
        """
        found: list[GuardIndex] = []
        for group, streak, fresh in self._lengths(trace):
            shape = group.shape
            if streak >= shape.run - shape.half and fresh >= shape.run - 1:
                words = [word[:end] for end in range(asked + 1, len(word))] if self._cuts else []
                for last in [*words, word] if whole else words:
                    recent = (*trace.recent, last)[-shape.run :]
                    if not self._sent(shape, recent, shape.fingerprint(recent[-shape.half :], self.guards.secret)):
                        found += self._holders(group, recent)
        return found

    def _holders(self, group: Group, run: tuple[str, ...]) -> list[GuardIndex]:
        fingerprint = group.shape.fingerprint(run, self.guards.secret)
        return [index for index in group.guards if fingerprint in index.whole]

    def _sent(self, shape: Shape, recent: tuple[str, ...], half: int) -> bool:
        """Whether the client sent the newest N/2 lexemes: as they are, as other names are not its own."""
        as_it_is = self.guards.secret.fingerprint(recent[-shape.half :]) if shape.fold else half
        return self._prompt.holds(as_it_is, shape.half, self.guards.secret, letters=self._spelt)


def _length(shape: Shape, streak: int, fresh: int) -> int:
    """Lexemes of the run that ends here, as far as the client did not send them; 0 while it is under N/2."""
    return min(streak + shape.half - 1, fresh) if streak else 0
