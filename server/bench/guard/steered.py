"""A system under attack that answers through the engine, so that a guard can steer it and hold a module's gate open."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import LogitsProcessor

from server.bench.attacks.attacked import Answer, Ids, Material, System
from server.bench.attacks.known import Attack
from server.bench.attacks.logits import Banned
from server.engine.embedded.engine import EmbeddedEngine
from server.engine.pinned import NOTHING, PinnedSet
from server.engine.request import GenerationRequest
from server.engine.request import Sampling as Wish
from unbind_core.architecture import LoadedModel
from unbind_core.guard.book import GuardSet
from unbind_core.module import UnbindModule
from unbind_core.running.generation import Sampling

SLOTS, LENGTH = 16, 2048
NEVER = -1e9


class _NotAsked(Exception):
    """The attack does with logits what no request can ask for."""


@dataclass(frozen=True)
class _Through(System):
    """As ``System``, each completion through the engine under guards, and modules where there are any."""

    engine: EmbeddedEngine | None = None
    guards: GuardSet | None = None
    pinned: PinnedSet = NOTHING

    def complete(
        self, prompts: Sequence[Ids], sampling: Sampling, *, processors: Sequence[LogitsProcessor] = ()
    ) -> list[list[int]]:
        """Completions, each up to the end token."""
        engine = self.engine
        assert engine is not None
        if any(not isinstance(processor, Banned) for processor in processors):
            raise _NotAsked
        banned = dict.fromkeys(
            sorted({*engine.tokenizer.all_special_ids, *engine.tokenizer.get_added_vocab().values()}), NEVER
        )
        gate = asyncio.Semaphore(2 * SLOTS)

        async def one(number: int, prompt: Ids) -> list[int]:
            wish = Wish(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed + number,
                logit_bias=banned if processors else (),
            )
            last = tuple(prompt)[-(LENGTH - wish.max_tokens) :]
            request = GenerationRequest(last, wish, self.pinned, guards=self.guards)
            async with gate:
                tokens = [token async for delta in engine.generate(request) for token in delta.tokens]
            return tokens[:-1] if tokens and tokens[-1] == engine.tokenizer.eos_token_id else tokens

        async def everything() -> list[list[int]]:
            return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))

        return asyncio.run(everything())


class Steered:
    """The model behind an engine with a steering guard."""

    def __init__(self, system: _Through, engine: EmbeddedEngine) -> None:
        self._system, self._engine = system, engine

    @classmethod
    def over(cls, loaded: LoadedModel, guards: GuardSet, module: UnbindModule | None = None) -> Steered:
        """``loaded`` belongs to the engine from now on. A guard of the ``module``'s name holds its gate open."""
        engine = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=SLOTS, max_length=LENGTH)
        engine.start()
        pinned = NOTHING
        if module is not None:
            engine.sync_modules([(module, module.digest)]).result()
            pinned = engine.modules.pin([module.name])
        return cls(_Through("steered", loaded, engine=engine, guards=guards, pinned=pinned), engine)

    def complete(self, prompts: Sequence[Ids], sampling: Sampling) -> list[list[int]]:
        """Completions, each up to the end token."""
        return self._system.complete(prompts, sampling)

    def attacked(self, attack: Attack, material: Material) -> list[Answer] | None:
        """The answers; None of an attack that reads or changes what only the bench has."""
        try:
            answers = attack.run(self._system, material)
        except _NotAsked:
            return None
        return None if any(answer.chosen is not None for answer in answers) else answers

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
