"""What lies in a folder that other processes write to and delete from meanwhile: Path.rglob raises there, os.walk does not."""

from __future__ import annotations

import os
from pathlib import Path

from unbind_core.files import UNFINISHED


def files_in(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return [Path(where) / name for where, _, names in os.walk(folder) for name in names]


def unfinished_in(folder: Path) -> list[Path]:
    """Every file and folder below a folder that is named as what is half-written (``unbind_core/files.py``)."""
    found = [Path(where) / name for where, folders, names in os.walk(folder) for name in (*folders, *names)]
    return [path for path in found if path.name.endswith(UNFINISHED)]
