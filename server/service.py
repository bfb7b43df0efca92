"""What a server process that computes its answers holds beside its ``BaseService``: model, engine, modules.

Routes reach it through the dependency ``service``. Built and torn down by the lifespan in ``app.py``.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from dataclasses import asdict, replace
from typing import Any, Self

import torch
from fastapi import Request

from server.base_service import REFRESH_SECONDS, BaseService
from server.encoding import Encoder, separators
from server.engine.answering import end_ids
from server.engine.choice import EngineOptions, EnginePlan, build_engine, plan_engine
from server.engine.modules import NO_GATES, Gates, ModuleTable
from server.engine.refusals import EngineStopped
from server.offer import Offer
from server.registry.store import ModuleStore
from server.settings import Settings
from server.telemetry.figures import Figures
from server.telemetry.metrics import Telemetry
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.encoding import fim_markers, fim_template, use_fim_template
from unbind_core.running.allowed import allowed_processors

log = logging.getLogger("unbind.service")
COUNT_SECONDS = 0.1
MOST_NAMED = 5


class Service(BaseService):
    """The parts of a running server."""

    loaded: LoadedModel

    def __init__(self, settings: Settings, loaded: LoadedModel, refresh_seconds: float = REFRESH_SECONDS) -> None:
        """``refresh_seconds``: between two looks at what other processes wrote."""
        self.memory = planned(settings, loaded)
        settings = settings.model_copy(update={"max_slots": self.memory.slots, "max_model_len": self.memory.length})
        self.loaded = loaded
        super().__init__(settings, refresh_seconds)
        self.engine = build_engine(settings.engine, loaded, self.memory, _options(settings))
        if settings.metrics_vllm_names:
            self.telemetry.name_as_vllm(settings.served_name, self.memory.length, self.engine.stats)
        self.vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self.encoder = Encoder(loaded.tokenizer, self.memory.length, self.vocabulary)
        self.separators = separators(loaded.tokenizer, end_ids(loaded.model, loaded.tokenizer))
        self.store = ModuleStore(settings.modules_dir, self.objects, self.registry.modules, loaded.identity)
        self.offer = Offer(settings, self.store, self.guard_store, self.engine, self.access)
        self.fim = fim_template(loaded.tokenizer)
        self.markers = fim_markers(loaded.tokenizer)
        self.fingerprint = f"fp_{loaded.identity.fingerprint[:12]}"  # what answers carry: the same for the same model
        self._unseen = Telemetry(self._figures, self.computed_by, detail=False)
        self._counts = NO_GATES
        self._counting: asyncio.Future[Gates] | None = None
        self._cut = False  # whether requests that ran were ended

    @property
    def modules(self) -> ModuleTable:
        """The modules that a request can name."""
        return self.engine.modules

    @property
    def title(self) -> str:
        """The model's name."""
        return self.settings.served_name

    @property
    def described(self) -> dict[str, Any]:
        """The model's identity."""
        return asdict(self.loaded.identity)

    async def gate_counts(self) -> Gates:
        """What the gates did, as new as can be had in ``COUNT_SECONDS``: the engine tells between two steps, and a scrape does not
        wait for a long one.
        """
        if self._counting is None or self._counting.done():
            try:
                self._counting = asyncio.wrap_future(self.engine.gates())
            except EngineStopped:
                return self._counts
            self._counting.add_done_callback(self._counted)
        await asyncio.wait({self._counting}, timeout=COUNT_SECONDS)
        return self._counts

    def _counted(self, counting: asyncio.Future[Gates]) -> None:
        if not counting.cancelled() and counting.exception() is None:
            self._counts = counting.result()

    def for_itself(self) -> Self:
        """The same for the server's own requests: what they are is in no metric."""
        view = copy.copy(self)
        view.internal, view.telemetry = True, self._unseen
        return view

    @property
    def computes(self) -> bool:
        """Whether the engine can make answers."""
        return self.engine.healthy

    @property
    def most_requests(self) -> int:
        """How many requests can run and wait at the same time."""
        return self.settings.queue_limit + self.settings.max_slots

    def _figures(self) -> Figures:
        refused = len(self.offer.scan.problems) + len(self.offer.guards.problems)
        audit, stats = len(self.registry.trail.problems), self.engine.stats()
        return Figures(
            stats.running, len(self.offer.missing_active), refused, audit, stats, modules=self.engine.modules.current
        )

    def give_up(self) -> None:
        """See :meth:`BaseService.give_up`."""
        self.engine.give_up()

    async def _open(self) -> None:
        await asyncio.to_thread(self.engine.start)
        await asyncio.to_thread(self._tell_of_others)

    def _tell_of_others(self) -> None:
        """Warn of modules in force for other models: none acts on this one, and nobody is refused for it."""
        others = self.registry.modules.live_of_others(self.loaded.identity.fingerprint)
        if others:
            named = ", ".join(others[:MOST_NAMED]) + (
                f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
            )
            log.warning(
                "in force for another model than '%s', and without effect here: %s. Where this model is theirs in another form "
                "(quantised, say), 'unbind module verify NAME --adopt' brings one over; 'unbind module show NAME' tells its model",
                self.settings.served_name,
                named,
            )

    async def end_requests(self, seconds: float) -> None:
        """Admit nothing more, give what runs ``seconds`` to end, and end what remains."""
        if await asyncio.to_thread(self.engine.drain, seconds) or self._cut:
            return  # or a second signal, which gives no time, has ended what ran and said so
        self._cut = True
        left = self.engine.stats()
        await asyncio.to_thread(self.engine.close)
        if left.running + left.waiting:
            log.warning(
                "%d requests that still ran and %d that waited after %g s (drain_timeout) were ended with an error",
                left.running,
                left.waiting,
                seconds,
            )

    async def _close(self) -> None:
        await asyncio.to_thread(self.engine.close)
        self.encoder.close()

    async def _all_counts(self) -> Gates:
        return await asyncio.wrap_future(self.engine.gates())


def planned(settings: Settings, loaded: LoadedModel) -> EnginePlan:
    """What the engine that the settings name will take. Raises UnbindError where it cannot be had."""
    return plan_engine(settings.engine, loaded, _options(settings))


def _options(settings: Settings) -> EngineOptions:
    return EngineOptions(
        model=settings.model,
        adapted=settings.adapter is not None,
        dtype=settings.dtype,
        device=settings.device,
        slots=settings.max_slots,
        length=settings.max_model_len,
        queue_limit=settings.queue_limit,
        chunk_tokens=settings.chunk_tokens,
        folder=settings.data_dir / "engine",
        columns=settings.gate_columns,
        layers=settings.gate_layers,
        flags=tuple(settings.vllm_args),
        looks=settings.metrics_detail,
    )


def load_served(settings: Settings) -> LoadedModel:
    """The model that the settings name, under the name it is served by. Raises UnbindError saying what is missing."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    elif (allowed := allowed_processors()) is not None:  # more would wait for each other's turns
        torch.set_num_threads(min(allowed, torch.get_num_threads()))
    device = settings.device if settings.engine == "embedded" else "cpu"  # others load it where it computes themselves
    loaded = load_model(settings.model, settings.adapter, dtype=getattr(torch, settings.dtype), device=device)
    use_fim_template(loaded.tokenizer, settings.fim_template)
    return replace(loaded, identity=replace(loaded.identity, name=settings.served_name))


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    found: Service = request.app.state.service
    return found


async def service(request: Request) -> Service:
    """The same for routes to depend on: a plain function would be run on a thread of its own, under load a long way round."""
    return service_of(request)
