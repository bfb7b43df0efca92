"""Where a takedown's files are under the data directory. Forget rows are sensitive: 0600 in folders of mode 0700.

Written by the admin API (rows) and the worker (results); read by the worker, and by the API for evidence.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unbind_core.files import remove_tree, remove_unfinished, write_text, write_whole
from unbind_core.rows import ForgetRow, forget_digest, parse_forget


def private(folder: Path) -> Path:
    """The folder, made where it is missing, for its owner alone."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def save_forget(data_dir: Path, rows: Sequence[ForgetRow]) -> str:
    """Keep a forget set under its digest, which is returned."""
    digest = forget_digest(rows)
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    save_text(forget_file(data_dir, digest), lines)
    return digest


def load_forget(path: Path) -> list[ForgetRow]:
    """The forget set in a file. Raises OSError where it is gone, DataError where it is damaged."""
    return parse_forget(path, "forget rows")


def has_forget(data_dir: Path, digest: str) -> bool:
    """Whether the rows are still kept."""
    return forget_file(data_dir, digest).is_file()


def purge(data_dir: Path, digest: str, job_ids: Sequence[str]) -> None:
    """Delete a forget set (none where ``digest`` is empty) and whatever its jobs left that holds pieces of it.

    Raises OSError where it is not all gone.
    """
    if digest:
        forget_file(data_dir, digest).unlink(missing_ok=True)
        tidy_forget(data_dir)
    for job_id in job_ids:
        remove_tree(data_dir / "jobs" / job_id)


def tidy_forget(data_dir: Path) -> None:
    """Delete the rows that a process which was killed left half written; what is being written stays."""
    remove_unfinished(forget_file(data_dir, "").parent)


def job_dir(data_dir: Path, job_id: str) -> Path:
    """The folder for a job's intermediate results; each attempt has one of its own within."""
    return private(data_dir / "jobs" / job_id)


def tidy(data_dir: Path, job_id: str, stages: Mapping[str, Any]) -> None:
    """Delete what the attempts of a job that has ended left and no finished stage refers to."""
    kept = {stage.get("folder") for stage in stages.values()}
    for folder in job_dir(data_dir, job_id).iterdir():
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)
        remove_unfinished(folder)


def save_json(path: Path, value: Any) -> None:
    """One JSON document, whole or not at all."""
    save_text(path, json.dumps(value, indent=1))


def save_text(path: Path, text: str) -> None:
    """A text for its owner alone, whole or not at all."""
    private(path.parent)
    write_text(path, text)


def save_bytes(path: Path, data: bytes) -> None:
    """A file for its owner alone, whole or not at all."""
    write_whole(path, lambda temporary: temporary.write_bytes(data))


def forget_file(data_dir: Path, digest: str) -> Path:
    """Where a forget set is."""
    return data_dir / "forget" / f"{digest}.jsonl"
