"""What the guard does to those who ask for nothing protected: ordinary code through the engine's own sampler and streams, with and
without own code in the prompt. A bar that the judge finds no run for is a false one.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from server.bench.guard import rows
from server.bench.guard.adversary import Writing
from server.bench.guard.matcher import Judge
from server.bench.guard.rows import SECRET
from server.bench.guard.script import Desk
from server.engine.guarding import Guarded
from server.engine.request import Delta, GenerationRequest, Sampling
from unbind_core.encoding import encode
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.index import build_index
from unbind_core.progress import Progress, ProgressCallback

RUNS = (50, 16)  # lexemes: the default, and one at which much ordinary code comes near
LEAST, MOST = 48, 64  # tokens of a completion
PROTECTED_SHARE = 20  # of the installed files every so many is protected, the others are ordinary
PROTECTED_ROWS, PROTECTED_LINES = 600, 20
AT_ONCE = 128
KEPT = 10


@dataclass
class Tally:
    """Of one kind of completion, by guard."""

    completions: int = 0
    held: Counter[str] = field(default_factory=Counter)  # those in which the judge finds a run
    barred: Counter[str] = field(default_factory=Counter)  # those that a guard changed
    mid_word: int = 0  # changed, as a run would have been complete if the answer had ended with a token within a word
    missed: int = 0  # held a run, and no guard changed them
    false: list[dict[str, Any]] = field(default_factory=list)  # changed, and no run in them


class Ordinary:
    """Guards over the demo's forget sets and a part of the installed sources."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._tokenizer, self._random = tokenizer, random.Random(seed)
        files = rows.sources(seed)
        self._files = [path for number, path in enumerate(files) if number % PROTECTED_SHARE]
        demo_rows = rows.forget_texts()
        self._rows = demo_rows + rows.windows(files[::PROTECTED_SHARE], PROTECTED_LINES, PROTECTED_ROWS)
        self._judges = {f"run {run}": Judge(self._rows, run) for run in RUNS}
        self._guards = self._set(self._rows, RUNS)
        self._demo = self._set(demo_rows, RUNS[:1])
        self._demo_judges = {f"run {RUNS[0]}": Judge(demo_rows, RUNS[0])}
        self._desk = Desk(tokenizer, AT_ONCE)

    @staticmethod
    def _set(texts: Sequence[str], lengths: Sequence[int]) -> GuardSet | None:
        indexes = [build_index(texts, name=f"run {run}", secret=SECRET, run=run) for run in lengths]
        return GuardBook.of(SECRET, indexes).select([index.name for index in indexes])

    def run(self, completions: int, progress: ProgressCallback) -> dict[str, Any]:
        """All of it; ``completions`` of ordinary code."""
        begun = time.perf_counter()
        usual = self._said(self._windows(completions), completions, progress)
        seconds = time.perf_counter() - begun
        own = self._said(self._own(), 2 * len(self._rows), progress)
        held_out = self._said(self._held_out(), 300, progress, of_demo=True)
        return {
            "false_bars": len(usual.false),
            "ordinary_completions": usual.completions,
            "holding_a_run": dict(usual.held),
            "changed": dict(usual.barred),
            "changed_mid_word": usual.mid_word,
            "missed": usual.missed + own.missed + held_out.missed,
            "protected_rows": len(self._rows),
            "completions_a_second": usual.completions / seconds,
            "own_code": {"completions": own.completions, "false_bars": len(own.false), "changed": dict(own.barred)},
            "retain_test": {
                "completions": held_out.completions,
                "false_bars": len(held_out.false),
                "changed_share": sum(held_out.barred.values()) / held_out.completions,
                "holding_a_run": dict(held_out.held),
            },
            "found": (usual.false + own.false + held_out.false)[:KEPT],
        }

    def _windows(self, most: int) -> Iterator[tuple[str, list[int]]]:
        """Ordinary code from everywhere, one window after the other, with some of what stands before it as the prompt."""
        made = 0
        for text in rows.texts(self._files):
            ids = self._ids(text)
            at, end = 16, 0
            while at + MOST <= len(ids) and made < most:
                end = at + self._random.randint(LEAST, MOST)
                yield str(self._tokenizer.decode(ids[at - 16 : at])), ids[at:end]
                at, made = end, made + 1
            if made >= most:
                return

    def _own(self) -> Iterator[tuple[str, list[int]]]:
        """A window of an editor that holds a protected row: its code is written again, as it was and indented anew."""
        for row in self._rows:
            for again in (row, row.replace("    ", "\t")):
                yield f"# the file\n{row}\n", self._ids(again)

    def _ids(self, text: str) -> list[int]:
        return encode(self._tokenizer, text)

    def _held_out(self) -> Iterator[tuple[str, list[int]]]:
        for prompt, rest in rows.retain_test():
            yield prompt, self._ids(rest)

    def _said(
        self, wanted: Iterator[tuple[str, list[int]]], most: int, progress: ProgressCallback, *, of_demo: bool = False
    ) -> Tally:
        """Each text said under the guards by a model that wants to say exactly it."""
        tally, told, (end,) = Tally(), 0, self._desk.ends
        guards, judges = (self._demo, self._demo_judges) if of_demo else (self._guards, self._judges)
        for prompt, ids in wanted:

            def hear(delta: Delta, prompt: str = prompt, ids: Sequence[int] = ids) -> None:
                if delta.finish_reason is not None and delta.guarded is not None:
                    self._count(tally, judges, prompt, ids, delta.guarded)

            sent = self._ids(prompt) or [end]
            request = GenerationRequest(tuple(sent), Sampling(max_tokens=len(ids)), guards=guards)
            self._desk.ask(request, Writing(ids, end), hear)
            if self._desk.busy >= AT_ONCE:
                self._desk.run(until=AT_ONCE - 16)
                if tally.completions // 1000 > told:
                    told = tally.completions // 1000
                    progress(Progress("completions", tally.completions, most))
        self._desk.run()
        return tally

    def _count(self, tally: Tally, judges: dict[str, Judge], prompt: str, ids: Sequence[int], guarded: Guarded) -> None:
        def said(tokens: int) -> str:
            return str(self._tokenizer.decode(list(ids[:tokens]), clean_up_tokenization_spaces=False))

        text = said(len(ids))
        changed = set(guarded.bars) | ({guarded.blocked.name} if guarded.blocked else set())
        holding = {name for name, judge in judges.items() if judge.found(text, judge.own(prompt))}
        tally.completions += 1
        tally.barred.update(changed)
        tally.held.update(holding)
        tally.missed += bool(holding) and not changed
        if not changed - holding or changed & holding:  # once a run is steered away from, the text is another one
            return
        parts = [said(tokens) for tokens in range(1, len(ids))]
        if any(judges[name].found(part, judges[name].own(prompt)) for name in changed for part in parts):
            tally.mid_word += 1
        else:
            tally.false.append({"guards": sorted(changed), "prompt": prompt[-200:], "text": text})
