"""What a takedown will take, from the settings: asked before a job is queued, and once more by the worker before it begins one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from server.settings import Settings
from unbind_core.cpu.linears import are_packed
from unbind_core.encoding import use_fim_template
from unbind_core.errors import DataError, UnbindError
from unbind_core.fitting.corrections.reference import Kind
from unbind_core.fitting.options import BUDGETS, FitOptions
from unbind_core.planning.amounts import Amounts
from unbind_core.planning.machine import Machine
from unbind_core.planning.plan import Plan, plan_takedown
from unbind_core.planning.room import Room
from unbind_core.rows import ForgetRow, RetainRow, parse_retain
from unbind_core.running.device import problem_of
from unbind_core.running.shape import Shape


@dataclass(frozen=True)
class Planned:
    """A plan, and the room that there is where it is to run."""

    plan: Plan
    room: Room

    @property
    def problem(self) -> str | None:
        """Why it does not fit; None where it does."""
        return self.room.problem(self.plan)

    def to_json(self) -> dict[str, Any]:
        """As dry runs and job records show it: what it takes, what is free now, and whether it fits."""
        return {**self.plan.to_json(), **self.room.to_json(), "fits": self.problem is None, "problem": self.problem}


def planned(
    settings: Settings,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[ForgetRow],
    options: Mapping[str, Any],
    *,
    beside: bool = False,
) -> Planned:
    """The plan of a takedown of these rows; ``model`` may be without weights. Raises UnbindError where no such fit is possible."""
    chosen = fit_options(options)
    if absent := problem_of(settings.fitting_device):
        raise UnbindError(f"{'worker_device' if settings.worker_device else 'device'}: {absent}")
    use_fim_template(tokenizer, settings.fim_template)
    amounts = Amounts.of(
        tokenizer,
        rows,
        retain_rows(settings.retain),
        retain_rows(settings.retain_calibration) if settings.retain_calibration else (),
        held_out_rows(settings),
        chosen,
    )
    device, shape = settings.fitting_device, Shape.of(model)
    room = Room.at(device, settings.data_dir / "cache")
    plan = plan_takedown(
        shape,
        amounts,
        Machine.measured(torch.device(device), getattr(torch, settings.dtype)),
        chosen,
        reference=Kind.NAMED if settings.reference else Kind.BASE if settings.adapter else Kind.ITSELF,
        packed=are_packed(shape.weights, torch.device(device), room.memory),
        beside=beside,
    )
    return Planned(plan, room)


def fit_options(options: Mapping[str, Any]) -> FitOptions:
    """A takedown's options as a fit takes them."""
    layers, gate = options.get("layers"), str(options.get("gate") or FitOptions().gate)
    return FitOptions(
        layers=tuple(layers) if layers else None,
        seed=int(options.get("seed") or 0),
        gate=gate,
        policy=options.get("policy"),
        budgets=replace(BUDGETS[gate], **options["budgets"]) if options.get("budgets") else None,
        effort=float(options.get("effort") or 1.0),
    )


def held_out_rows(settings: Settings) -> list[RetainRow]:
    """The retain rows of the before/after table."""
    return retain_rows(settings.retain_test)[: settings.retain_test_limit] if settings.retain_test else []


def retain_rows(path: Path) -> list[RetainRow]:
    """Rows of a settings' file. Raises DataError naming it and the remedy."""
    try:
        return parse_retain(path)
    except OSError as error:
        raise DataError(f"retain rows {path}: {error.strerror}; set 'retain' to a JSONL file of rows to keep") from None
