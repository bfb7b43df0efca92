"""Which engine serves: by name, each with a ``build`` module of its own that plans its memory and makes it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from server.engine.engine import Engine
from unbind_core.architecture import LoadedModel


@dataclass(frozen=True)
class EngineOptions:
    """What engines are told. ``slots`` and ``length`` 0: as much as model and memory allow. ``folder``: for files that an engine
    makes. For vLLM: ``columns``, int32 of gates' memory a position; ``flags``, its own; ``layers`` behind which modules may stand,
    -1 being the last, all where none are named. ``looks``: whether scores and requests of gates are counted.
    """

    model: Path
    adapted: bool
    dtype: str
    device: str
    slots: int
    length: int
    queue_limit: int
    chunk_tokens: int
    folder: Path
    columns: int
    flags: tuple[str, ...]
    layers: tuple[int, ...] = ()
    looks: bool = True


class EnginePlan(Protocol):
    """What an engine will take, decided before anything is allocated; as text, one line for a person."""

    @property
    def slots(self) -> int:
        """Requests that can run at the same time."""

    @property
    def length(self) -> int:
        """Prompt and answer tokens of one request."""


def plan_engine(name: str, loaded: LoadedModel, options: EngineOptions) -> EnginePlan:
    """Raises UnbindError where it does not fit, or cannot be had here."""
    plan: EnginePlan = _module(name).plan(loaded, options)
    return plan


def build_engine(name: str, loaded: LoadedModel, plan: EnginePlan, options: EngineOptions) -> Engine:
    """The engine, not started."""
    engine: Engine = _module(name).build(loaded, plan, options)
    return engine


def _module(name: str) -> Any:
    return import_module(f"server.engine.{name}.build")
