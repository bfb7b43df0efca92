"""What the engines are asked about, an engine that runs on it, and its answers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from server.engine.choice import EngineOptions, build_engine, plan_engine
from server.engine.engine import Engine
from server.engine.request import GenerationRequest, Sampling
from unbind_core.architecture import LoadedModel
from unbind_core.module import UnbindModule

LENGTH = 1600
SLOTS = 16
ROOM = 512_000_000  # bytes of keys and values where nothing is to be preempted
COLUMNS = 256  # of the gates of all modules


@dataclass(frozen=True)
class Subject:
    """What is compared: a checkpoint (its adapter or none), how it is loaded, modules for it, and prompts of its own kind."""

    model: Path
    adapter: Path | None
    load: Callable[[], LoadedModel]
    modules: Sequence[UnbindModule]
    prompts: Sequence[Sequence[int]]


@contextmanager
def running(subject: Subject, name: str, memory: int = ROOM) -> Iterator[Engine]:
    """An engine on the subject, with its modules."""
    loaded = subject.load()
    with tempfile.TemporaryDirectory() as folder:
        device = next(iter(loaded.model.parameters())).device.type
        options = EngineOptions(
            model=subject.model,
            adapted=subject.adapter is not None,
            dtype=str(next(iter(loaded.model.parameters())).dtype).removeprefix("torch."),
            device=device,
            slots=SLOTS,
            length=LENGTH,
            queue_limit=100_000,
            chunk_tokens=512,
            folder=Path(folder),
            columns=COLUMNS,
            flags=(f"kv-cache-memory-bytes={memory}", "max-num-batched-tokens=512", "block-size=32"),
        )
        engine = build_engine(name, loaded, plan_engine(name, loaded, options), options)
        engine.start()
        try:
            engine.sync_modules([(module, module.digest) for module in subject.modules]).result(300)
            yield engine
        finally:
            engine.close()


async def answered(
    engine: Engine, wanted: Sequence[tuple[Sequence[int], Mapping[str, float], int]]
) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of each, and how many prompt tokens were taken over."""
    turn, cached = asyncio.Semaphore(64), 0

    async def one(prompt: Sequence[int], modules: Mapping[str, float], new: int) -> tuple[int, ...]:
        nonlocal cached
        request = GenerationRequest(tuple(prompt), Sampling(max_tokens=new), engine.modules.pin(modules))
        async with turn:
            flight, deltas = engine.submit(request)
            while (await deltas.get()).finish_reason is None:
                pass
        cached += flight.cached_tokens
        return tuple(flight.output)

    return list(await asyncio.gather(*(one(*each) for each in wanted))), cached
