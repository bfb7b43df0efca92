"""The stages of a job: check -> fit, or adopt -> verify -> joint -> publish. Each leaves files, so a next attempt can go on.

Run by ``child.py`` in a process of its own; the method itself is ``unbind_core``.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from server.planning.planned import fit_options, held_out_rows, retain_rows
from server.registry.files import save_json
from server.registry.tables import JobKind
from server.settings import Settings
from server.sources import load_settings
from server.worker.context import MODULE_FILE, SCORES_FILE, Context, ProgressCall
from server.worker.plan import Task
from server.worker.share import Share
from unbind_core.cpu.linears import packed_linears
from unbind_core.encoding import available_forms, pad_id
from unbind_core.evaluation.drafts import Drafts
from unbind_core.evaluation.scores import extractable, forget_scores
from unbind_core.evaluation.verify import verify
from unbind_core.fitting.adopt import adopt
from unbind_core.fitting.corrections.reference import Kind, Reference, load_reference
from unbind_core.fitting.fit import fit, prepare_retained


def _reference(settings: Settings, gate: str) -> Reference | None:
    """What a learned correction leads towards; held while the fit runs."""
    if gate != "auto":
        return None
    dtype = getattr(torch, settings.dtype)
    return load_reference(
        settings.model, settings.adapter, named=settings.reference, dtype=dtype, device=settings.fitting_device
    )


def check(context: Context) -> dict[str, Any]:
    """Can the rows be extracted at all? ``memorised`` false ends the job: there is nothing to remove. Leaves each row's score."""
    model, tokenizer = context.loaded.model, context.loaded.tokenizer
    drafts = Drafts(model, pad=pad_id(tokenizer), end=tokenizer.eos_token_id)
    scores = forget_scores(
        model,
        tokenizer,
        context.forget,
        forms=available_forms(tokenizer),
        attempts=0,
        progress=context.progress,
        greedily=partial(drafts.complete, None, progress=context.progress),
        stage="check",
    )
    save_json(context.folder / SCORES_FILE, [dataclasses.asdict(score) for score in scores])
    return dict(extractable(model, tokenizer, context.forget, scores=scores))


def fit_module(context: Context) -> dict[str, Any]:
    """Fit and calibrate; leaves the module file and the whole report in the attempt's folder."""
    loaded, settings = context.loaded, context.settings
    beside = len(context.task.beside(loaded.identity.fingerprint))
    options = dataclasses.replace(fit_options(context.task.options), beside=beside)
    module, report = fit(
        loaded.model,
        loaded.tokenizer,
        context.forget,
        retain_rows(settings.retain),
        name=context.task.name,
        retain_calibration=retain_rows(settings.retain_calibration) if settings.retain_calibration else (),
        identity=loaded.identity,
        options=options,
        progress=context.progress,
        cache=settings.data_dir / "cache",
        before=context.checked,
        reference=_reference(settings, options.gate),
    )
    module.save(context.folder / MODULE_FILE)
    full = {**report.to_json(), "budgets": dict(module.budgets)}
    save_json(context.folder / "report.json", finite(full))
    return {
        "outcome": report.outcome,
        "selected": full["selected"],
        "seconds": full["seconds"],
        "retain_rows_left_out": len(report.retain_rows_left_out),
        "retain_rows_alike": len(report.retain_rows_alike),
        "certificate": full["certificate"],
    }


def adopt_module(context: Context) -> dict[str, Any]:
    """Measure a module of another model as a fit measures its own; leaves it where it holds."""
    loaded, settings, module = context.loaded, context.settings, context.about()
    found = adopt(
        loaded.model,
        loaded.tokenizer,
        module,
        context.forget,
        retain_rows(settings.retain),
        retain_calibration=retain_rows(settings.retain_calibration) if settings.retain_calibration else (),
        identity=loaded.identity,
        reference=_reference(settings, "auto"),
        progress=context.progress,
        cache=settings.data_dir / "cache",
    )
    if found.module is not None:
        found.module.save(context.folder / MODULE_FILE)
    return found.to_json()


def verify_module(context: Context) -> dict[str, Any]:
    """The before/after table; leaves what the evidence shows besides."""
    from server.worker.exhibits import exhibits

    loaded, settings = context.loaded, context.settings
    retain, module, attempts = held_out_rows(settings), context.module(), settings.verify_attempts
    table = verify(
        loaded.model,
        loaded.tokenizer,
        module,
        context.forget,
        retain,
        identity=loaded.identity,
        attempts=attempts,
        before=context.checked if attempts == 0 else None,
        cache=settings.data_dir / "cache",
        progress=context.progress,
    )
    save_json(context.folder / "exhibits.json", finite(exhibits(loaded, module, context.forget, retain)))
    return dict(table)


def joint(context: Context) -> dict[str, Any]:
    """What the modules in force cost together with this one on retain rows, held against the budgets of one.

    ``beside`` in the result: their digests, None where the cost decides nothing. The module is activated beside these alone.
    """
    from server.worker.joint import measure_together

    task, settings = context.task, context.settings
    if not task.measures_jointly:
        return {"measured": False, "within": True, "beside": None}
    others = task.beside(context.loaded.identity.fingerprint)
    beside = sorted(str(record["digest"]) for record in others)
    if not others:
        return {"measured": False, "within": True, "beside": beside}
    rows = retain_rows(settings.retain_calibration or settings.retain)
    modules = [context.module(), *(context.stored(record) for record in others)]
    return {**measure_together(context.loaded, modules, rows, context.progress), "beside": beside}


def publish(context: Context) -> dict[str, Any]:
    """Write the module with its before/after table into it; the worker puts it where servers look."""
    module = context.module()
    table = context.task.done["verify"]["result"]
    measured = {**module.measured, "before": table.get("before"), "after": table.get("after")}
    digest = dataclasses.replace(module, measured=measured).save(context.folder / f"final-{MODULE_FILE}")
    return {"digest": digest, "file": f"final-{MODULE_FILE}", "fingerprint": context.loaded.identity.fingerprint}


def prepare(context: Context) -> dict[str, Any]:
    """What every takedown needs of the retain rows alone goes into the cache."""
    loaded, settings = context.loaded, context.settings
    calibration = retain_rows(settings.retain_calibration) if settings.retain_calibration else ()
    seconds = prepare_retained(
        loaded.model,
        loaded.tokenizer,
        retain_rows(settings.retain),
        retain_calibration=calibration,
        held_out=held_out_rows(settings),
        identity=loaded.identity,
        reference=Reference(Kind.NAMED) if settings.reference else _reference(settings, "auto"),
        progress=context.progress,
        cache=settings.data_dir / "cache",
    )
    return {"seconds": seconds}


def finite(value: Any) -> Any:
    """The same JSON value with infinities and NaN as null, which JSON has not."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _stage(work: Callable[[Context], dict[str, Any]]) -> Callable[[Task, ProgressCall], dict[str, Any]]:
    def run(task: Task, progress: ProgressCall) -> dict[str, Any]:
        settings = load_settings(environment=os.environ)
        context = Context(settings, task, Share(settings.worker_threads).watching(progress))
        if task.kind == JobKind.TAKEDOWN:
            context.require_room()
            context.require_served()  # each time: what another attempt has finished may be of another model
        with packed_linears(context.loaded.model):
            result: dict[str, Any] = finite(work(context))
        return result

    return run


STAGES = {
    "check": _stage(check),
    "fit": _stage(fit_module),
    "adopt": _stage(adopt_module),
    "verify": _stage(verify_module),
    "joint": _stage(joint),
    "publish": _stage(publish),
    "prepare": _stage(prepare),
}
