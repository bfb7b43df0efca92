"""Clients that try to get a protected run past the guard, by the thousand: the engine's own sampler and streams, and a model that
wants to say it. All that leaves is judged as it leaves.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from server.bench.guard.adversary import Forcing, Telling
from server.bench.guard.disguise import Spelling, written
from server.bench.guard.matcher import Judge, Watch
from server.bench.guard.rows import SECRET
from server.bench.guard.script import Desk, Script
from server.engine.request import Delta, GenerationRequest, Sampling, TokenLogprob
from unbind_core.encoding import fim_prompt
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.index import Action, build_index
from unbind_core.progress import Progress, ProgressCallback

AT_ONCE, LEFT = 128, 96  # answers in flight: more are asked for as soon as no more than LEFT are
KEPT = 20  # violations that are reported whole
UNRELATED = "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n\n\n"
ALONE = 40  # every so many tries one is made without a guard, to see what the others would have said
_OFTEN = (6, 0.7, 1, 0.7, 1, 1, 1, 0.5)  # of the ways below: what ends answers early shows little
# Lexemes of a run, how often it is tried, rows, and lexemes of a row at most.
SIZES = ((8, 0.6, 40, 40), (12, 0.22, 40, 60), (16, 0.16, 40, 80), (50, 0.02, 16, 400))


@dataclass(frozen=True)
class Arm:
    """Guards that hold for a try, and those who judge whether they held."""

    name: str
    rows: Sequence[str]
    guards: GuardSet | None
    judges: tuple[Judge, ...]


def arms(rows: Sequence[str], seed: int) -> list[tuple[float, list[Arm]]]:
    """For each length of a run, with how often it is tried: guards of every action and patience over pieces of ``rows``."""
    rng, found = random.Random(seed), []
    for run, often, count, most in SIZES:
        pieces = _pieces(rng, rows, run, count, most)
        judge, half = Judge(pieces, run), len(pieces) // 2
        made = [
            Arm(f"{action} {bars}", pieces, guards_of((pieces, run, action, bars)), (judge,))
            for action, bars in (("steer", 1), ("steer", 3), ("steer", 100), ("stop", 1))
        ]
        judges = Judge(pieces[:half], run), Judge(pieces[half:], run)
        mixed = guards_of((pieces[:half], run, "steer", 3), (pieces[half:], run, "stop", 3))
        made.append(Arm("steer and stop", pieces, mixed, judges))
        longer = Judge(pieces, run), Judge(pieces, run + 3)
        lengths = guards_of((pieces, run, "steer", 100), (pieces, run + 3, "stop", 1))
        made.append(Arm("two lengths", pieces, lengths, longer))
        folded = build_index(pieces, name="folded", secret=SECRET, run=run, fold=True)
        made.append(
            Arm("folded", pieces, GuardBook.of(SECRET, [folded]).select(["folded"]), (Judge(pieces, run, folded=True),))
        )
        found.append((often, made))
    return found


def guards_of(*parts: tuple[Sequence[str], int, str, int]) -> GuardSet:
    """One guard for each of ``parts``: its rows, lexemes of a run, action and bars."""
    indexes = [
        build_index(rows, name=f"g{number}", secret=SECRET, run=run, action=_action(action), bars=bars)
        for number, (rows, run, action, bars) in enumerate(parts)
    ]
    selected = GuardBook.of(SECRET, indexes).select([index.name for index in indexes])
    assert selected is not None
    return selected


def _action(name: str) -> Action:
    return "stop" if name == "stop" else "steer"


def _pieces(rng: random.Random, rows: Sequence[str], run: int, count: int, most: int) -> list[str]:
    """Rows from the beginning of some line on, as long as ``most`` lexemes are, about; each holds two runs."""
    found: list[str] = []
    judge = Judge((), run)
    while len(found) < count:
        row = rng.choice(rows)
        starts = [0, *(at + 1 for at, c in enumerate(row) if c == "\n")]
        piece = row[rng.choice(starts[: len(starts) // 2 + 1]) :][: 4 * most]
        if judge.lexemes(piece) >= 2 * run:
            found.append(piece)
    return found


@dataclass
class Tally:
    """What came of the tries."""

    tries: int = 0
    violations: int = 0
    kept: list[dict[str, Any]] = field(default_factory=list)
    met: int = 0  # tries in which a run was steered away from, or that one ended
    alone: int = 0  # tries without a guard
    alone_held: int = 0  # and what of them held a run
    by: Counter[str] = field(default_factory=Counter)


class Client:
    """One request, and all that it gets to see."""

    def __init__(self, number: int, arm: Arm, guarded: bool, prompt: str, ways: Sequence[str], tally: Tally) -> None:
        self.number, self.arm, self.guarded, self.prompt, self.ways = number, arm, guarded, prompt, ways
        self._tally = tally
        # what it sent of any row is its own, whichever guard protects that row
        self._own = frozenset[str]().union(*(judge.own(prompt) for judge in arm.judges if prompt))
        self._watches = [Watch(judge, self._own) for judge in arm.judges]
        self._tokens: list[int] = []
        self._shown: list[TokenLogprob] = []

    def hear(self, spelling: Spelling, delta: Delta) -> None:
        """A part of the answer."""
        for watch in self._watches:
            watch.take(delta.text)
        self._tokens += delta.tokens
        self._shown += [entry for entry in (*delta.prompt_logprobs, *delta.logprobs) if entry is not None]
        if delta.finish_reason is not None:
            self._end(spelling, delta)

    def _end(self, spelling: Spelling, delta: Delta) -> None:
        found = {"text": next((watch.found for watch in self._watches if watch.found), "")}
        likeliest = [[e.top[0][0] for e in own] for told, own in groupby(self._shown, lambda e: bool(e.top)) if told]
        for way, parts in (("tokens", [self._tokens]), ("likeliest tokens", likeliest)):
            found[way] = next((run for part in parts if (run := self._held(spelling.text(part)))), "")
        self._tally_up({way: run for way, run in found.items() if run}, delta)

    def _held(self, text: str) -> str:
        return next((run for judge in self.arm.judges if (run := judge.found(text, self._own))), "")

    def _tally_up(self, found: dict[str, str], delta: Delta) -> None:
        tally = self._tally
        if not self.guarded:
            tally.alone += 1
            tally.alone_held += bool(found)
            return
        tally.tries += 1
        tally.by.update([self.arm.name, *self.ways])
        tally.met += bool(delta.guarded and (delta.guarded.bars or delta.guarded.blocked))
        if found:
            tally.violations += 1
            if len(tally.kept) < KEPT:
                where = {"try": self.number, "guards": self.arm.name, "ways": self.ways, "prompt": self.prompt}
                tally.kept.append({**where, "runs": found, "text": self._watches[0].text})


class Tries:
    """Draws tries from a seed; the same seed and number give the same try."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[str], seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self._spelling = Spelling(tokenizer)
        self._arms = arms(rows, seed)
        self.desk = Desk(tokenizer, AT_ONCE)
        self.tally = Tally()

    def run(self, tries: int, progress: ProgressCallback) -> dict[str, Any]:
        """So many answers under guards, and what they held."""
        begun, number, told = time.perf_counter(), 0, 0
        while (left := tries - self.tally.tries) > 0:
            while self.desk.busy < min(left, AT_ONCE):
                self.draw(number, most=min(left, AT_ONCE) - self.desk.busy)
                number += 1
            self.desk.run(until=min(left - 1, LEFT) if left > AT_ONCE else 0)
            if self.tally.tries // 1000 > told:
                told = self.tally.tries // 1000
                progress(Progress("tries", self.tally.tries, tries))
        tally, seconds = self.tally, time.perf_counter() - begun
        return {
            "violations": tally.violations,
            "tries": tally.tries,
            "tries_that_met_a_run": tally.met,
            "tries_a_second": tally.tries / seconds,
            "seed": self._seed,
            "without_guard": {"tries": tally.alone, "violations": tally.alone_held},
            "tries_by_way": dict(tally.by),
            "found": tally.kept,
        }

    def draw(self, number: int, most: int = 4) -> None:
        """Ask what try ``number`` asks: one answer, or a few of which the best would count."""
        rng = random.Random(f"{self._seed} {number}")
        arm = rng.choice(rng.choices(self._arms, [often for often, _ in self._arms])[0][1])
        row = rng.choice(arm.rows)
        length = min(4 * arm.judges[0].run + 8, 160)
        guards = arm.guards if number % ALONE else None
        text = written(rng, row, 4 * length)
        if rng.random() < 0.1:
            text = (
                text[: rng.randrange(len(text))]
                + rng.choice(("", "\n", " x "))
                + written(rng, rng.choice(arm.rows), 4 * length)
            )
        prompt, ids = self._prompt(rng, row, text)
        telling = rng.random() < 0.1
        for _ in range(1 if telling else min(most, rng.choice((1, 1, 1, 2, 4)))):
            own = random.Random(rng.getrandbits(64))
            ways, sampling, script = self._told(own, text, ids, length) if telling else self._forced(own, text, length)
            client = Client(number, arm, guards is not None, prompt, ways, self.tally)
            request = GenerationRequest(tuple(ids), sampling, guards=guards)
            self.desk.ask(request, script, lambda delta, client=client: client.hear(self._spelling, delta))  # type: ignore[misc]

    def _prompt(self, rng: random.Random, row: str, text: str) -> tuple[str, list[int]]:
        """What is sent: nothing that helps, all of the row up to any point, some of what is wanted, or a hole to fill."""
        cut, way = rng.randrange(len(row)), rng.random()
        if way < 0.45:
            sent = UNRELATED[: rng.choice((7, 40, 200))]
        elif way < 0.6:
            sent = rng.choice(("", UNRELATED)) + row[:cut] + "\n"
        elif way < 0.7:
            sent = rng.choice(("", UNRELATED)) + (text[: rng.randrange(len(text))] or "\n")
        elif way < 0.75:
            sent = row + "\n\n"
        elif way < 0.9:
            ids = fim_prompt(self._tokenizer, row[:cut], row[cut + rng.randrange(60) :])
            assert ids is not None
            return str(self._tokenizer.decode(ids, skip_special_tokens=True)), ids
        else:
            message = {"role": "user", "content": "Say it:\n" + row[: rng.choice((0, cut))]}
            sent = str(self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
        return sent, self._spelling.spelt(rng, sent, 0.0)

    def _forced(self, rng: random.Random, text: str, length: int) -> tuple[list[str], Sampling, Script]:
        (end,) = self.desk.ends
        ids = self._spelling.spelt(rng, text[: 4 * length])
        ways: dict[str, dict[str, Any]] = {
            "greedy": {},
            "drawn": {
                "temperature": rng.choice((0.5, 1.0, 2.0)),
                "top_p": rng.choice((1.0, 0.9)),
                "top_k": rng.choice((0, 40)),
            },
            "bias": {"logit_bias": dict.fromkeys(ids[:64], rng.choice((5.0, 100.0)))},
            "penalties": {
                "repetition_penalty": 1.3,
                "frequency_penalty": rng.choice((-2.0, 1.0)),
                "presence_penalty": 1.0,
            },
            "stop strings": {"stop": tuple(self._stops(rng, text)), "min_tokens": rng.choice((0, 0, 9))},
            "stop tokens": {"stop_token_ids": tuple(rng.sample(ids[-20:], 1)), "min_tokens": rng.choice((0, 5))},
            "log-probabilities": {"logprobs": rng.choice((0, 1, 3))},
            "an indent": {"least_indent": rng.choice((1, 4))},
        }
        chosen = set(rng.choices(list(ways), _OFTEN, k=rng.choice((1, 1, 1, 2, 3))))
        options: dict[str, Any] = {}
        for way in chosen:
            options |= ways[way]
        sampling = Sampling(
            max_tokens=rng.randint(2 * length // 3, length),
            seed=rng.getrandbits(32),
            ignore_eos=rng.random() < 0.1,
            **options,
        )
        return sorted(chosen), sampling, Forcing(rng, self._spelling, text, end)

    def _told(
        self, rng: random.Random, text: str, prompt: Sequence[int], length: int
    ) -> tuple[list[str], Sampling, Script]:
        """The row is looked for among the likeliest tokens, while the answer says something else by a bias."""
        tokens = self._spelling.spelt(rng, text, rng.choice((0.0, 0.2)))
        said = [self._spelling.token(rng.choice((" ", "\n", "x", "tmp", "(")))] * rng.choice((1, 5)) + tokens[
            :6
        ] * rng.choice((0, 1))
        often = rng.choice((0, 1))
        options: dict[str, Any] = {"logit_bias": {said[0]: 100.0}} if often else {"temperature": rng.choice((1.0, 3.0))}
        whole = len(prompt) > 8 and rng.random() < 0.4
        if whole:
            options["prompt_logprobs"] = 1
        sampling = Sampling(max_tokens=length, logprobs=rng.choice((1, 2, 5)), seed=rng.getrandbits(32), **options)
        return ["likeliest tokens"], sampling, Telling(tokens, said, len(prompt), whole)

    @staticmethod
    def _stops(rng: random.Random, text: str) -> list[str]:
        found = []
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(text) // 3, len(text))
            found.append(text[at : at + rng.choice((1, 2, 3, 8))])
        return found
