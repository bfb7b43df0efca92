"""A data folder with thousands of takedowns in it: records as the registry writes them, and whole files in the store.

Modules are ``modules/demo-a.safetensors`` again and again, as in ``server/bench/many.py``. A guard's fingerprints are random: as
many as the rows of the demo's set A have, which is what that module was fitted on.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from server import demo
from server.bench.many import FITTED, fitted_again
from server.guarding import build_guard, guard_secret
from server.registry import records
from server.registry.audit import Actor
from server.registry.records import NewModule
from server.registry.registry import open_registry
from server.registry.tables import Kind, Origin
from server.settings import Settings
from unbind_core.errors import UnbindError
from unbind_core.guard.fingerprints import Fingerprints, Sorted
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.rows import ForgetRow, parse_forget

BY = Actor("bench", "stored")
AT_ONCE = 500  # records of a transaction


def filled(settings: Settings, modules: int, in_force: int, guards: int, progress: ProgressCallback) -> str:
    """``fill``, unless an earlier run has filled the folder. Raises UnbindError where that was with other amounts."""
    mark, amounts = settings.data_dir / "amounts.json", [modules, in_force, guards]
    if not mark.exists():
        fill(settings, modules, in_force, guards, progress)
        mark.write_text(json.dumps(amounts), encoding="utf-8")
    if (found := json.loads(mark.read_text(encoding="utf-8"))) != amounts:
        raise UnbindError(
            f"--folder: {settings.data_dir} was filled with {found} (modules, in force, guards), not {amounts}"
        )
    return _name(modules)


def fill(settings: Settings, modules: int, in_force: int, guards: int, progress: ProgressCallback) -> str:
    """Store ``modules`` and ``guards``. The first ``in_force`` modules and all guards bind every request; the other modules are
    calibrated, as what waits for its day. Returns the name of one more module, calibrated too.
    """
    objects = Path(settings.published_store) / "objects"
    objects.mkdir(parents=True)
    _record(
        settings, _modules(objects, modules + 1), in_force, lambda done: progress(Progress("modules", done, modules))
    )
    _record(
        settings, _guards(settings, objects, guards), guards, lambda done: progress(Progress("guards", done, guards))
    )
    return _name(modules)


def _name(number: int) -> str:
    return f"bench{number:05}"


def _modules(folder: Path, count: int) -> Iterator[NewModule]:
    base = UnbindModule.load(FITTED)
    for number in range(count):
        module = replace(fitted_again(base, number), name=_name(number))
        digest, file = _put(folder, module.to_bytes())
        yield NewModule(module.name, digest, module.model.fingerprint, file, Origin.TAKEDOWN, scope="global")


def _guards(settings: Settings, folder: Path, count: int) -> Iterator[NewModule]:
    secret, random = guard_secret(settings), np.random.default_rng(0)
    real = build_guard("real", _rows(), {}, secret)

    def drawn(like: int) -> Sorted:
        return np.unique(random.integers(0, 2**64, like, np.uint64))

    for number in range(count):
        name = f"guard{number:05}"
        whole = Fingerprints(drawn(len(real.whole.values)))
        marks = {stretch: drawn(len(runs)) for stretch, runs in real.marks.items()}
        data = replace(real, name=name, whole=whole, half=drawn(len(real.half)), marks=marks).to_bytes()
        digest, file = _put(folder, data)
        facts = real.facts | {"name": name, "digest": digest}
        yield NewModule(name, digest, "", file, Origin.TAKEDOWN, scope="global", kind=Kind.GUARD, facts=facts)


def _rows() -> list[ForgetRow]:
    path = demo.ROWS / "forget_a.jsonl"
    return parse_forget(path, path.name)


def _put(folder: Path, data: bytes) -> tuple[str, str]:
    """What ``ObjectStore.put`` does, less its waiting for the disk at each file; the digest as well."""
    digest = hashlib.sha256(data).hexdigest()
    (folder / f"{digest}.safetensors").write_bytes(data)
    return digest, f"objects/{digest}.safetensors"


def _record(settings: Settings, found: Iterator[NewModule], in_force: int, tell: Callable[[int], None]) -> None:
    registry = open_registry(settings)
    try:
        number, now = 0, time.time()
        while batch := list(islice(found, AT_ONCE)):
            with registry.transactions.change() as session:
                for new in batch:
                    records.add(session, new, "auto" if number < in_force else "manual", BY, now)
                    number += 1
            tell(number)
    finally:
        registry.close()


def evicted(folder: Path) -> None:
    """Have the files of a folder on the disk, and as far as the system obliges no longer in memory."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
