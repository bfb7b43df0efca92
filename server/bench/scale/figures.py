"""What a takedown takes at real model sizes: each stage measured on what fits here, predicted for what does not.

Some layers of an architecture, with random weights (``world.py``), go through the stages with few rows. The cost model of
``unbind_core.planning`` is held against what was measured, and tells of all layers and of many rows: memory and disk as it stands,
which are bounds; time corrected by what the measured stages took.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from server.bench.filter import _Phase, make_bank
from server.bench.scale.world import bare, rows, with_weights
from unbind_core.applying.hooks import Intervention
from unbind_core.architecture import LoadedModel
from unbind_core.cpu.linears import are_packed
from unbind_core.encoding import available_forms, pad_id
from unbind_core.evaluation.drafts import Drafts
from unbind_core.evaluation.scores import forget_scores
from unbind_core.evaluation.verify import verify
from unbind_core.files import told
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.corrections.reference import Reference
from unbind_core.fitting.fit import fit
from unbind_core.fitting.options import Clock, FitOptions, Target
from unbind_core.planning.amounts import Amounts
from unbind_core.planning.machine import Machine
from unbind_core.planning.plan import Plan, plan_takedown
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.running.device import forget_peak, free_bytes, peak_bytes
from unbind_core.running.shape import Shape

# Few of the training steps, as each costs what any costs; and whatever gate is tried first is good enough.
OPTIONS = FitOptions(
    effort=0.01,
    budgets=Budgets(kl=99.0, nll=99.0, bleu=1.0, open_rate=1.0),
    target=Target(alone_cut=-9.0, alone_recovery=1.0, above_empty=1.0),
).settled()
# Stages of the plan and what a fit calls their parts.
PARTS = {
    "calibration": ("calibration states", "retain completions"),
    "forget states": ("forget states", "rows met elsewhere"),
    "reference": ("rows before", "reference"),
}
KINDS = ("fisher", "network")


@dataclass(frozen=True)
class Size:
    """How much of it is measured: decoder layers, rows, tokens of each."""

    layers: int
    forget: int
    retain: int
    length: int


def figures(
    name: str,
    sizes: Sequence[Size],
    full: Size,
    *,
    dtype: torch.dtype,
    device: str,
    modules: Sequence[int],
    progress: ProgressCallback,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """``measured``: stages of each size; ``predicted``: of ``full``; ``filter``: what the edits of one layer cost.

    ``of_plan`` of a stage: what was measured over what was planned. Memory beside what the process held before. ``report`` hears of
    each size as it ends, so that a run that is cut off has told something.
    """
    _give_back()
    measured, steps = [], len(sizes) + 2
    for done, size in enumerate(sizes):
        progress(Progress("takedown", done, steps, f"{size.layers} layers, {size.forget} and {size.retain} rows"))
        measured.append(_takedown(name, size, dtype, device, progress))
        report(told_of(measured[-1]))
    progress(Progress("filter", steps - 2, steps))
    cost = _filter(name, dtype, device, modules)
    factors = {
        stage: statistics.median(one["stages"][stage]["of_plan"]["seconds"] for one in measured)
        for stage in measured[0]["stages"]
    }
    shape = Shape.of(bare(name, dtype))
    whole = replace(full, layers=shape.layers)
    amounts = Amounts.even(whole.forget, whole.retain, whole.length)
    plan = _planned(shape, amounts, torch.device(device), dtype, FitOptions().settled())
    predicted = plan.to_json()
    for stage in predicted["stages"]:
        stage["seconds"] = round(stage["seconds"] * factors.get(stage["name"], 1.0), 1)
    predicted["seconds"] = round(sum(stage["seconds"] for stage in predicted["stages"]), 1)
    return {
        "config": name,
        "weights": "random",
        "tokenizer": "stand-in of 4,096 tokens",
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "threads": torch.get_num_threads(),
        "width": shape.width,
        "layers": shape.layers,
        "vocabulary": shape.vocabulary,
        "measured": measured,
        "predicted": {**vars(whole), **predicted},
        "filter": cost,
    }


def _planned(shape: Shape, amounts: Amounts, where: torch.device, dtype: torch.dtype, options: FitOptions) -> Plan:
    packed = are_packed(shape.weights, where, free_bytes(where))
    return plan_takedown(shape, amounts, Machine.measured(where, dtype), options, packed=packed)


def _takedown(name: str, size: Size, dtype: torch.dtype, device: str, progress: ProgressCallback) -> dict[str, Any]:
    """One takedown's stages, seconds and bytes."""
    loaded = with_weights(name, dtype, device, size.layers)
    model, tokenizer, where = loaded.model, loaded.tokenizer, torch.device(device)
    forget, retain = rows(tokenizer, size.forget, size.retain, size.length)
    held = retain[: max(1, size.forget)]
    options, shape = OPTIONS, Shape.of(model)
    amounts = Amounts.of(tokenizer, forget, retain, (), held, options)
    plan = _planned(shape, amounts, where, dtype, options)
    forget_peak(where)
    before, clock = peak_bytes(where), Clock(where)
    with clock.stage("check"):
        drafts = Drafts(model, pad=pad_id(tokenizer), end=tokenizer.eos_token_id)
        forms = available_forms(tokenizer)
        greedily = partial(drafts.complete, None)
        scores = forget_scores(model, tokenizer, forget, forms=forms, attempts=0, greedily=greedily)
        del drafts, greedily
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        module, report = fit(
            model,
            tokenizer,
            forget,
            retain,
            name="scale",
            identity=loaded.identity,
            options=options,
            cache=cache,
            before=scores,
            progress=progress,
            reference=Reference(most=0.0),  # random weights recite nothing: there is to be something to learn
        )
        with clock.stage("verify"):
            verify(
                model,
                tokenizer,
                module,
                forget,
                held,
                identity=loaded.identity,
                attempts=0,
                before=scores,
                cache=cache,
            )
        disk = sum(file.stat().st_size for file in cache.iterdir())
    seconds, memory = {**report.seconds, **clock.seconds}, {**report.memory, **clock.memory}
    return {
        **vars(size),
        "disk_bytes": disk,
        "planned_disk_bytes": plan.disk,
        "weights_bytes": shape.weights,
        "stages": _against(plan, shape.weights, seconds, memory, before),
    }


def told_of(one: dict[str, Any]) -> str:
    """A size's stages on one line."""
    stages = (
        f"{name} {stage['seconds']:.1f} s ({stage['planned_seconds']:.1f} planned), {told(stage['memory_bytes'])} of "
        f"{told(stage['planned_memory_bytes'])}"
        for name, stage in one["stages"].items()
    )
    return f"{one['layers']} layers, {one['forget']} and {one['retain']} rows of {one['length']}: " + "; ".join(stages)


def _against(
    plan: Plan, weights: int, seconds: dict[str, float], memory: dict[str, int], before: int
) -> dict[str, dict[str, Any]]:
    """Stages of the plan beside what was measured of them."""
    found = {}
    for stage in plan.stages:
        parts = [part for part in PARTS.get(stage.name, (stage.name,)) if part in seconds]
        if not parts:
            continue
        took, held = sum(seconds[part] for part in parts), max(memory[part] for part in parts) - before
        planned = stage.memory - weights
        found[stage.name] = {
            "seconds": round(took, 3),
            "memory_bytes": held,
            "planned_seconds": round(stage.seconds, 3),
            "planned_memory_bytes": planned,
            "of_plan": {"seconds": took / max(stage.seconds, 1e-6), "memory": held / planned},
        }
    return found


def _filter(name: str, dtype: torch.dtype, device: str, counts: Sequence[int]) -> list[dict[str, Any]]:
    """What the modules of one decoder layer cost, over a layer and over a whole step: of all layers, and of the head at each
    row's last position.
    """
    one, two = (with_weights(name, dtype, device, layers) for layers in (1, 2))
    all_layers, head = Shape.of(bare(name, dtype)).layers, one.model.get_output_embeddings()  # type: ignore[operator]
    found = []
    with torch.inference_mode():
        for name_of_phase in ("decode", "prefill"):
            phase = _Phase(_without_head(one), name_of_phase)
            shorter, longer = _forward(one, name_of_phase), _forward(two, name_of_phase)
            a_layer = max(longer - shorter, 1e-9)
            last = torch.zeros((phase.batch, one.identity.hidden_size), dtype=dtype, device=device)
            step = shorter + (all_layers - 1) * a_layer + _median(lambda: phase.seconds(lambda: head(last)))  # noqa: B023
            for kind in KINDS:
                for count in counts:
                    bank = make_bank(one.identity, count, "one layer", torch.device(device), kind)
                    selection = bank.select([dict.fromkeys(bank.names, 1.0)] * phase.batch)
                    assert selection is not None
                    phase.remember(selection)
                    edit = _median(lambda: phase.edit_seconds(selection))  # noqa: B023
                    found.append(
                        {
                            "phase": name_of_phase,
                            "kind": kind,
                            "modules": count,
                            "edit_ms": 1e3 * edit,
                            "over_a_layer": edit / a_layer,
                            "over_a_step": edit / step,
                            "step_ms": 1e3 * step,
                        }
                    )
    return found


def _without_head(loaded: LoadedModel) -> LoadedModel:
    inner: Any = loaded.model
    return replace(loaded, model=inner.base_model)


def _forward(loaded: LoadedModel, phase: str) -> float:
    """Seconds of a plain pass through the layers."""
    timed = _Phase(_without_head(loaded), phase)
    with Intervention(loaded.model) as intervention:
        return _median(lambda: timed.forward_seconds(intervention, None))


def _median(once: Callable[[], float]) -> float:
    """Of three, after one that does not count."""
    once()
    return statistics.median(once() for _ in range(3))


def _give_back() -> None:
    """Have the C library give memory back once it is freed, so that a process's peak is what a stage held."""
    threshold, trim = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3)
    library = ctypes.CDLL(None)
    for option in (threshold, trim):
        library.mallopt(option, 1 << 16)
