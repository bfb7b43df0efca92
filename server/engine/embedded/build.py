"""The embedded engine from the options of all engines."""

from __future__ import annotations

from server.engine.choice import EngineOptions
from server.engine.embedded.engine import EmbeddedEngine
from server.engine.embedded.memory import MemoryPlan, plan_memory
from unbind_core.architecture import LoadedModel


def plan(loaded: LoadedModel, options: EngineOptions) -> MemoryPlan:
    """Raises DoesNotFit."""
    return plan_memory(loaded.model, options.slots, options.length)


def build(loaded: LoadedModel, plan: MemoryPlan, options: EngineOptions) -> EmbeddedEngine:
    """The engine on this very model."""
    return EmbeddedEngine(
        loaded.model,
        loaded.tokenizer,
        max_slots=plan.slots,
        max_length=plan.length,
        queue_limit=options.queue_limit,
        chunk_tokens=options.chunk_tokens,
        looks=options.looks,
    )
