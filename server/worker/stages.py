"""The stages of a job: check -> fit -> verify -> joint -> publish. Each reads and leaves files, so a next attempt can go on.

Run by ``child.py`` in a process of its own; the method itself is ``unbind_core``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch

from server.planning.planned import fit_options, held_out_rows, planned, retain_rows
from server.registry.files import load_forget, save_json
from server.registry.objects import DamagedObject, ObjectStore
from server.registry.tables import JobKind, Origin
from server.settings import Settings
from server.sources import load_settings
from server.worker.plan import PATIENCE_SECONDS, Task
from server.worker.share import Share
from unbind_core.architecture import LoadedModel, load_model, outline
from unbind_core.cpu.linears import packed_linears
from unbind_core.encoding import available_forms, pad_id
from unbind_core.errors import DataError
from unbind_core.evaluation.drafts import Drafts
from unbind_core.evaluation.scores import RowScore, extractable, forget_scores
from unbind_core.evaluation.verify import verify
from unbind_core.fitting.fit import fit, prepare_retained
from unbind_core.fitting.reference import Reference, load_reference
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress
from unbind_core.rows import ForgetRow

MODULE_FILE, SCORES_FILE = "module.safetensors", "scores.json"
PATIENCE_STEP = 1.0  # seconds between two looks at a store that does not answer
_had_room: set[str] = set()  # folders of attempts that began here, whose later stages find less free
ProgressCall = Callable[[Progress], None]


@dataclass(frozen=True)
class Context:
    """What a stage works with.

    A module store that does not answer is asked every ``patience_step`` seconds, for ``patience`` seconds.
    """

    settings: Settings
    task: Task
    progress: ProgressCall
    patience: float = PATIENCE_SECONDS
    patience_step: float = PATIENCE_STEP

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model that is served."""
        settings = self.settings
        torch.set_num_threads(settings.worker_threads)
        return _model(settings.model, settings.adapter, settings.dtype, settings.fitting_device, settings.served_name)

    def require_room(self) -> None:
        """Raise TooLarge where the job's fit does not fit the device and the disk as they are; asked before the model is loaded."""
        if "fit" in self.task.done or self.task.folder in _had_room:
            return
        settings = self.settings
        model, tokenizer = outline(settings.model, dtype=getattr(torch, settings.dtype))
        found = planned(settings, model, tokenizer, self.forget, self.task.options, beside=bool(self.task.others))
        found.room.require(found.plan)
        _had_room.add(self.task.folder)

    @cached_property
    def forget(self) -> list[ForgetRow]:
        """The rows to forget."""
        try:
            return load_forget(Path(self.task.rows))
        except FileNotFoundError:
            raise DataError(f"the forget rows {self.task.forget_digest[:12]} were purged; submit them again") from None

    @property
    def folder(self) -> Path:
        """Where this attempt leaves its files."""
        return Path(self.task.folder)

    def left_by(self, stage: str) -> Path:
        """The folder of the attempt that finished a stage."""
        return self.folder.parent / str(self.task.done[stage]["folder"])

    @property
    def checked(self) -> list[RowScore] | None:
        """What ``check`` found of each row under the unedited model, greedily and in all forms; None where it did not run."""
        if "check" not in self.task.done:
            return None
        known = (self.left_by("check") / SCORES_FILE).read_text(encoding="utf-8")
        return [RowScore(**score) for score in json.loads(known)]

    def module(self) -> UnbindModule:
        """The module that the job made, or is about."""
        if "fit" in self.task.done:
            return UnbindModule.load(self.left_by("fit") / MODULE_FILE, self.loaded.identity)
        assert self.task.module is not None
        return self.stored(self.task.module)

    def stored(self, record: Mapping[str, Any]) -> UnbindModule:
        """The module of a record. Raises DataError where the store does not give it in time."""
        if record["origin"] == Origin.SHIPPED:
            return UnbindModule.load(record["file"], self.loaded.identity)
        store, patient_until = ObjectStore(self.settings.published_store), time.monotonic() + self.patience
        while True:
            try:
                return UnbindModule.from_bytes(store.get(record["file"], record["digest"]), record["file"])
            except DamagedObject as error:
                raise DataError(f"module '{record['name']}': {error}, then retry the job") from None
            except OSError as error:
                reason = f"module '{record['name']}' could not be read from the module store ({error})"
                if time.monotonic() > patient_until:
                    raise DataError(
                        f"{reason}; bring the store back, or retire that module, and retry the job"
                    ) from None
            self.progress(Progress("waiting for the module store", 0, 1, reason))
            time.sleep(self.patience_step)


@cache
def _model(model: Path, adapter: Path | None, dtype: str, device: str, name: str) -> LoadedModel:
    loaded = load_model(model, adapter, dtype=getattr(torch, dtype), device=device)
    return replace(loaded, identity=replace(loaded.identity, name=name))


def _reference(settings: Settings, gate: str) -> Reference | None:
    """What a learned correction leads towards; held while the fit runs."""
    if gate != "auto":
        return None
    dtype = getattr(torch, settings.dtype)
    return load_reference(
        settings.reference, settings.model, settings.adapter, dtype=dtype, device=settings.fitting_device
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
    loaded, settings, options = context.loaded, context.settings, fit_options(context.task.options)
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
        "certificate": full["certificate"],
    }


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
        with packed_linears(context.loaded.model):
            result: dict[str, Any] = finite(work(context))
        return result

    return run


STAGES = {
    "check": _stage(check),
    "fit": _stage(fit_module),
    "verify": _stage(verify_module),
    "joint": _stage(joint),
    "publish": _stage(publish),
    "prepare": _stage(prepare),
}
