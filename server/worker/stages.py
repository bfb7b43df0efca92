"""The stages of a takedown: check -> fit -> verify -> publish. Each reads and leaves files, so a next worker can go on.

Called by ``server/worker/worker.py`` under a lease; the method itself is ``unbind_core``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from server.registry.files import job_dir, load_forget, save_json
from server.settings import Settings
from unbind_core.architecture import LoadedModel
from unbind_core.errors import DataError
from unbind_core.evaluation import extractable, verify
from unbind_core.fitting import FitOptions, fit
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback
from unbind_core.rows import ForgetRow, RetainRow, parse_retain

# Share of the whole job's time, as measured on the demo world; progress is reported in these proportions.
SHARES = {"check": 0.05, "fit": 0.55, "verify": 0.38, "publish": 0.02}
STAGES = tuple(SHARES)

NOTHING_TO_REMOVE = "nothing_to_remove"
INEFFECTIVE = "ineffective"
ACTIVE = "active"


@dataclass(frozen=True)
class StageContext:
    """What a stage works with."""

    settings: Settings
    loaded: LoadedModel
    job_id: str
    name: str
    forget_digest: str
    options: dict[str, Any]
    progress: ProgressCallback

    @cached_property
    def forget(self) -> list[ForgetRow]:
        """The rows to forget."""
        return load_forget(self.settings.data_dir, self.forget_digest)

    @property
    def module_file(self) -> Path:
        """The fitted module, before it is published."""
        return job_dir(self.settings.data_dir, self.job_id) / "module.safetensors"


def check(context: StageContext) -> dict[str, Any]:
    """Can the rows be extracted at all? ``memorised`` false ends the job: there is nothing to remove."""
    loaded = context.loaded
    return dict(extractable(loaded.model, loaded.tokenizer, context.forget, progress=context.progress))


def fit_module(context: StageContext) -> dict[str, Any]:
    """Fit and calibrate; leaves the module file and the whole report in the job's folder."""
    loaded, settings = context.loaded, context.settings
    layers = context.options.get("layers")
    seed = int(context.options.get("seed", 0))
    module, report = fit(
        loaded.model,
        loaded.tokenizer,
        context.forget,
        _retain_rows(settings.retain),
        name=context.name,
        retain_calibration=_retain_rows(settings.retain_calibration) if settings.retain_calibration else (),
        identity=loaded.identity,
        options=FitOptions(layers=tuple(layers) if layers else None, seed=seed),
        progress=context.progress,
        cache=settings.data_dir / "cache",
    )
    module.save(context.module_file)
    full = report.to_json()
    save_json(context.module_file.with_name("report.json"), full)
    return {"outcome": report.outcome, "selected": full["selected"], "seconds": full["seconds"]}


def verify_module(context: StageContext) -> dict[str, Any]:
    """The before/after table."""
    loaded, settings = context.loaded, context.settings
    retain = _retain_rows(settings.retain_test)[: settings.retain_test_limit] if settings.retain_test else []
    module = UnbindModule.load(context.module_file, loaded.identity)
    return dict(
        verify(
            loaded.model,
            loaded.tokenizer,
            module,
            context.forget,
            retain,
            attempts=settings.verify_attempts,
            progress=context.progress,
        )
    )


def publish(context: StageContext, table: dict[str, Any]) -> dict[str, str]:
    """Put the module, with its before/after table, where servers look; returns its digest and file."""
    module = UnbindModule.load(context.module_file, context.loaded.identity)
    measured = {**module.measured, "before": table.get("before"), "after": table.get("after")}
    path = context.settings.published_dir / f"{context.name}.safetensors"
    digest = dataclasses.replace(module, measured=measured).save(path)
    return {"digest": digest, "file": str(path)}


def _retain_rows(path: Path) -> list[RetainRow]:
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_retain(lines, str(path))
    except OSError as error:
        raise DataError(f"retain rows {path}: {error.strerror}; set 'retain' to a JSONL file of rows to keep") from None


def finite(value: Any) -> Any:
    """The same JSON value with infinities and NaN as null, which JSON has not."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


RUN: dict[str, Callable[[StageContext], dict[str, Any]]] = {
    "check": check,
    "fit": fit_module,
    "verify": verify_module,
}
