"""vLLM's processes killed at random instants under load: what every answer was, and how long until the engine is ready again.

Each request is a protected prompt under the module that was fitted on it. The judge is the embedded engine, which nobody kills:
its greedy answers with the module and without.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import psutil

from server.bench.engines.subject import Subject, answered, running
from server.engine.engine import Engine
from server.engine.refusals import EngineStopped
from server.engine.request import GenerationRequest, Sampling
from unbind_core.errors import UnbindError
from unbind_core.progress import Progress, ProgressCallback

VICTIMS = ("EngineCore", "Worker")  # vLLM's names of the processes that schedule and that hold the model
CLIENTS = 6
NEW = 48  # tokens
PAUSE_SECONDS = 4.0  # at most, between being ready and the next kill
AGAIN = 0.25  # of the kills are followed by another while the processes start
START_SECONDS = 4.0
READY_SECONDS = 300.0
Tokens = tuple[int, ...]


def judged(tokens: Tokens, whole: bool, expected: Tokens, plain: Tokens) -> str:
    """``expected``; ``cut``: a beginning of that and an error; ``plain``: what the model says without the module; ``other``."""
    for name, full in (("expected" if whole else "cut", expected), ("plain", plain)):
        if tokens == (full if whole else full[: len(tokens)]):
            return name
    return "other"


class _Load:
    """Clients that ask again and again, and what came back."""

    def __init__(self, engine: Engine, module: str, answers: Sequence[tuple[Sequence[int], Tokens, Tokens]]) -> None:
        self._engine, self._module, self._answers = engine, module, answers
        self.told: Counter[str] = Counter()
        self.over = False

    async def client(self, number: int) -> None:
        """Ask until it is over, and then for one whole answer more."""
        turn, said = number, ""
        while not (self.over and said == "expected"):
            prompt, expected, plain = self._answers[turn % len(self._answers)]
            turn += 1
            pinned = self._engine.modules.pin([self._module])
            request = GenerationRequest(tuple(prompt), Sampling(max_tokens=NEW), pinned)
            tokens: list[int] = []
            try:
                async for delta in self._engine.generate(request):
                    tokens += delta.tokens
                    reason = delta.finish_reason
            except EngineStopped:
                said = "refused"
            else:
                said = judged(tuple(tokens), reason != "error", expected, plain)
            self.told[said] += 1
            if said in ("refused", "cut"):
                await asyncio.sleep(0.2)


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def _kill(victim: str, spared: Container[psutil.Process]) -> bool:
    """End one of the processes of this name at once, none of ``spared``; whether there was one."""
    for child in await asyncio.to_thread(_children):
        try:
            if child not in spared and victim in " ".join(child.cmdline()):
                os.kill(child.pid, signal.SIGKILL)
                return True
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return False


async def _until(engine: Engine, healthy: bool) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while engine.healthy != healthy:
        if time.monotonic() > deadline:
            raise UnbindError(
                f"the engine was not {'ready again' if healthy else 'seen to end'} in {READY_SECONDS:g} s"
            )
        await asyncio.sleep(0.02)


async def _killing(
    engine: Engine,
    load: _Load,
    kills: int,
    seed: int,
    progress: ProgressCallback,
    others: Container[psutil.Process],
) -> dict[str, Any]:
    drawn = random.Random(seed)
    clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
    of: Counter[str] = Counter()
    noticed: list[float] = []
    ready: list[float] = []
    while of.total() < kills:
        await asyncio.sleep(drawn.uniform(0, PAUSE_SECONDS))
        began, victim = time.monotonic(), drawn.choice(VICTIMS)
        if not await _kill(victim, others):
            raise UnbindError(f"there is no process '{victim}' to kill")
        of[victim] += 1
        await _until(engine, healthy=False)
        noticed.append(time.monotonic() - began)
        if of.total() < kills and drawn.random() < AGAIN:
            await asyncio.sleep(drawn.uniform(0, START_SECONDS))
            again = time.monotonic()
            if not engine.healthy and await _kill(victim, others):
                began = again
                of[f"{victim}, starting"] += 1
        await _until(engine, healthy=True)
        ready.append(time.monotonic() - began)
        progress(Progress("kills", of.total(), kills))
    load.over = True
    async with asyncio.timeout(READY_SECONDS):
        await asyncio.gather(*clients)
    return {
        "kills": dict(of),
        "answers": {name: load.told[name] for name in ("expected", "cut", "plain", "other", "refused")},
        "noticed_seconds": {"median": statistics.median(noticed), "worst": max(noticed)},
        "ready_seconds": {"median": statistics.median(ready), "worst": max(ready)},
    }


def killed(subject: Subject, kills: int, seed: int, progress: ProgressCallback) -> dict[str, Any]:
    """Kill that many processes. ``answers``: see :func:`judged`; ``refused``: those asked while the processes started. Seconds
    count from a kill, or from the last one before the engine was ready. Raises UnbindError where it is not in READY_SECONDS.
    """
    module = subject.modules[0].name
    with running(subject, "embedded") as engine:
        asked = [(prompt, strengths, NEW) for prompt in subject.prompts for strengths in ({module: 1.0}, {})]
        found, _ = asyncio.run(answered(engine, asked))
    pairs = zip(subject.prompts, found[::2], found[1::2], strict=True)
    protected = [(prompt, expected, plain) for prompt, expected, plain in pairs if expected != plain]
    if not protected:
        raise UnbindError(f"module '{module}' changes no answer, so that none could be judged")
    others = frozenset(_children())  # of an engine, perhaps, that the caller has
    with running(subject, "vllm") as engine:
        load = _Load(engine, module, protected)
        return {
            "prompts": len(protected),
            **asyncio.run(_killing(engine, load, kills, seed, progress, others)),
        }
