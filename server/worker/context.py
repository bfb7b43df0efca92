"""What a stage of a job works with: settings, task, the model that is served, the rows and the modules it is about."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from server.planning.planned import planned
from server.registry.files import load_forget
from server.registry.objects import DamagedObject, ObjectStore
from server.registry.tables import ModuleState, Origin
from server.settings import Settings
from server.worker.plan import MAKING, PATIENCE_SECONDS, Task
from unbind_core.architecture import LoadedModel, load_model, outline
from unbind_core.encoding import use_fim_template
from unbind_core.errors import DataError
from unbind_core.evaluation.scores import RowScore
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
        found = settings.model, settings.adapter, settings.dtype, settings.fitting_device
        return _model(*found, settings.served_name, settings.fim_template)

    def require_served(self) -> None:
        """Raise DataError where the server that took the takedown would not load what is made here, and wait for it for ever."""
        served, dtype = self.task.options.get("served") or {}, self.settings.dtype
        if served.get("dtype", dtype) != dtype:
            raise DataError(
                f"dtype: this worker computes in {dtype}, and the server that took the takedown in {served['dtype']}, which loads "
                f"no module of {dtype}; start the worker with --dtype {served['dtype']} and retry the job"
            )
        own = self.loaded.identity.fingerprint
        if served.get("fingerprint", own) != own:
            raise DataError(
                f"model: this worker has the model {own[:12]}, and the server that took the takedown {served['fingerprint'][:12]}; "
                "start the worker on the server's checkpoint and adapter, and retry the job"
            )

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
            where = "private_store" if self.settings.private_store else "data_dir"  # no purge takes them from a job
            raise DataError(
                f"{where}: this worker's holds no forget rows {self.task.forget_digest[:12]}; where it is not the server's, or "
                "the server has a private_store, start the worker with the server's and retry the job; else the rows were "
                "deleted by hand or not restored: submit them again"
            ) from None

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
        for stage in MAKING:
            if stage in self.task.done:
                return UnbindModule.load(self.left_by(stage) / MODULE_FILE, self.loaded.identity)
        return self.about()

    def about(self) -> UnbindModule:
        """The module that was there before the job."""
        assert self.task.module is not None
        return self.stored(self.task.module)

    def stored(self, record: Mapping[str, Any]) -> UnbindModule:
        """The module of a record. Raises DataError where the store does not give it in time."""
        if record["origin"] == Origin.SHIPPED:
            return UnbindModule.load(record["file"])
        store, patient_until = ObjectStore(self.settings.published_store), time.monotonic() + self.patience
        while True:
            try:
                return UnbindModule.from_bytes(store.get(record["file"], record["digest"]), record["file"])
            except DamagedObject as error:
                raise DataError(f"module '{record['name']}': {error}, then retry the job") from None
            except OSError as error:
                if isinstance(error, FileNotFoundError) and record["state"] == ModuleState.RETIRED:
                    raise DataError(
                        f"module '{record['name']}' version {record['version']} is retired, and its file is not in the store any "
                        "more; make a new version instead"
                    ) from None
                reason = f"module '{record['name']}' could not be read from the module store ({error})"
                if time.monotonic() > patient_until:
                    raise DataError(
                        f"{reason}; bring the store back, or retire that module, and retry the job"
                    ) from None
            self.progress(Progress("waiting for the module store", 0, 1, reason))
            time.sleep(self.patience_step)


@cache
def _model(model: Path, adapter: Path | None, dtype: str, device: str, name: str, fim: str) -> LoadedModel:
    loaded = load_model(model, adapter, dtype=getattr(torch, dtype), device=device)
    use_fim_template(loaded.tokenizer, fim)
    return replace(loaded, identity=replace(loaded.identity, name=name))
