"""What the guard costs: tokens a second and delays of the engine by number of protected rows, memory, and time to build."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from server.bench.guard import rows
from server.bench.guard.rows import SECRET
from server.engine.embedded.engine import EmbeddedEngine
from server.engine.guarding import Guarding
from server.engine.request import GenerationRequest, Sampling
from server.engine.text import TextStream
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import encode_prompt
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.index import build_index
from unbind_core.progress import Progress, ProgressCallback

LINES = 15  # of a row
PART = 1_000  # rows of one takedown: as many takedowns as that makes are loaded at once
STREAMS, PROMPT, NEW = 8, 64, 64


@dataclass(frozen=True)
class Timed:
    """One round of streams: seconds by the clock and of the processor, and medians of what the streams waited."""

    wall: float
    processor: float
    first: float
    between: float


def build(texts: Sequence[str]) -> tuple[GuardBook, dict[str, float]]:
    """Guards over these rows, as that many takedowns, and what building took."""
    begun = time.perf_counter()
    parts = [texts[at : at + PART] for at in range(0, len(texts), PART)]
    indexes = [build_index(part, name=f"g{number}", secret=SECRET) for number, part in enumerate(parts)]
    built = time.perf_counter() - begun
    book = GuardBook.of(SECRET, indexes)
    lexemes = sum(index.lexemes for index in indexes)
    held = sum(index.rows for index in indexes)
    return book, {
        "takedowns": len(parts),
        "rows": held,
        "lexemes": lexemes,
        "lexemes_of_a_row": lexemes / held,
        "build_seconds_a_row": built / held,
        "load_seconds": time.perf_counter() - begun - built,
        "bytes": book.nbytes,
        "bytes_per_lexeme": book.nbytes / lexemes,
        "file_bytes_per_lexeme": sum(len(index.to_bytes()) for index in indexes) / lexemes,
    }


class Cost:
    """The demo model's engine with streams of ordinary code."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._engine = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=STREAMS, max_length=PROMPT + NEW + 1)
        self._engine.start()
        texts = ["".join(pair) for pair in rows.retain_test()]
        self._prompts = [ids[:PROMPT] for text in texts if len(ids := encode_prompt(loaded.tokenizer, text)) >= PROMPT]

    def run(self, sizes: Sequence[int], repeats: int, progress: ProgressCallback) -> dict[str, Any]:
        """``repeats`` rounds of each size and one without a guard, in a drawn order each time."""
        texts = rows.windows(rows.sources(0), LINES, max(sizes))
        sets: dict[int, GuardSet | None] = {0: None}
        built = {}
        for size in sizes:
            book, built[str(size)] = build(texts[:size])
            sets[size] = book.select(book.names)
            progress(Progress("indexes", len(built), len(sizes)))
        timed: dict[int, list[Timed]] = {size: [] for size in sets}
        order = random.Random(0)
        for repeat in range(repeats + 1):  # the first one warms up
            for size in order.sample(list(sets), len(sets)):
                prompts = order.sample(
                    self._prompts, STREAMS
                )  # new ones, as a slot may still know those of the last round
                found = self._round(prompts, sets[size])
                if repeat:
                    timed[size].append(found)
            progress(Progress("rounds", repeat + 1, repeats + 1))
        plain = timed[0]
        return {
            "throughput_ratio": {str(size): self._ratio(plain, timed[size], "wall")["median"] for size in sizes},
            "bytes_per_lexeme": built[str(max(sizes))]["bytes_per_lexeme"],
            "build_seconds_a_row": built[str(max(sizes))]["build_seconds_a_row"],
            "tokens_a_second_without": STREAMS * NEW / statistics.median(one.wall for one in plain),
            "repeats": repeats,
            "threads": torch.get_num_threads(),
            "by_rows": {
                str(size): {
                    **built[str(size)],
                    "microseconds_a_token": self._microseconds(sets[size]),
                    "throughput": self._ratio(plain, timed[size], "wall"),
                    "processor_time": self._ratio(plain, timed[size], "processor"),
                    "first_token": self._ratio(timed[size], plain, "first"),
                    "between_tokens": self._ratio(timed[size], plain, "between"),
                }
                for size in sizes
            },
            "first_token_ms_without": 1000 * statistics.median(one.first for one in plain),
            "between_tokens_ms_without": 1000 * statistics.median(one.between for one in plain),
        }

    def _microseconds(self, guards: GuardSet | None) -> float:
        """What looking at a token costs, on the held-out rows laid through the guard: the least of some rounds."""
        assert guards is not None
        found = []
        for _ in range(5):
            spent, tokens = 0.0, 0
            for ids in self._prompts[:40]:
                guarding = Guarding(guards, self._engine.tokenizer, (), cuts=False, shows=False)
                stream = TextStream(self._engine.tokenizer, ())
                for token in ids:
                    begun = time.perf_counter()
                    guarding.accepts(token, stream.peek(token))
                    spent += time.perf_counter() - begun
                    stream.push(token)
                tokens += len(ids)
            found.append(1e6 * spent / tokens)
        return min(found)

    @staticmethod
    def _ratio(over: Sequence[Timed], under: Sequence[Timed], what: str) -> dict[str, float]:
        """Median and quarters of the ratios, round by round; and of the medians, which bears a noisy machine better."""
        upper, lower = ([float(getattr(one, what)) for one in timed] for timed in (over, under))
        found = [a / b for a, b in zip(upper, lower, strict=True)]
        quarters = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        medians = statistics.median(upper) / statistics.median(lower)
        return {
            "median": quarters[1],
            "from": quarters[0],
            "to": quarters[2],
            "of_medians": medians,
            "of_least": min(upper) / min(lower),
        }

    def _round(self, prompts: Sequence[Sequence[int]], guards: GuardSet | None) -> Timed:
        async def one(prompt: Sequence[int]) -> tuple[float, float]:
            sampling = Sampling(max_tokens=NEW, ignore_eos=True)
            begun, first, now = time.perf_counter(), 0.0, 0.0
            async for _ in self._engine.generate(GenerationRequest(tuple(prompt), sampling, guards=guards)):
                now = time.perf_counter() - begun
                first = first or now
            return first, (now - first) / (NEW - 1)

        async def everything() -> list[tuple[float, float]]:
            return list(await asyncio.gather(*map(one, prompts)))

        wall, processor = time.perf_counter(), time.process_time()
        waited = asyncio.run(everything())
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        firsts, between = zip(*waited, strict=True)
        return Timed(wall, processor, statistics.median(firsts), statistics.median(between))

    def close(self) -> None:
        """Give the model back."""
        self._engine.close()
