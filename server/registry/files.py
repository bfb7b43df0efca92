"""Where a takedown's files are under the data directory. Forget rows are sensitive: 0600 in folders of mode 0700.

Written by the admin API (rows) and the worker (results); read by the worker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unbind_core.files import write_whole
from unbind_core.rows import ForgetRow, forget_digest, parse_forget


def _private(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def save_forget(data_dir: Path, rows: Sequence[ForgetRow]) -> str:
    """Keep a forget set under its digest, which is returned."""
    digest = forget_digest(rows)
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    _write(_private(data_dir / "forget") / f"{digest}.jsonl", lines)
    return digest


def load_forget(data_dir: Path, digest: str) -> list[ForgetRow]:
    """The forget set of this digest. Raises OSError where it is gone, DataError where it is damaged."""
    with (data_dir / "forget" / f"{digest}.jsonl").open(encoding="utf-8") as lines:
        return parse_forget(lines)


def job_dir(data_dir: Path, job_id: str) -> Path:
    """The folder for a job's intermediate results."""
    return _private(data_dir / "jobs" / job_id)


def save_json(path: Path, value: Any) -> None:
    """One JSON document, whole or not at all."""
    _write(path, json.dumps(value, indent=1))


def _write(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        temporary.chmod(0o600)
        temporary.write_text(text, encoding="utf-8")

    write_whole(path, write)
