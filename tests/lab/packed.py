"""Packages of made-up code, as pip and npm bring them."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
import zipfile
from pathlib import Path

from unbind_lab.building.recipe import Package

WORDS = [
    a + b for a in ("read", "send", "open", "sort", "hash", "join", "move", "scan") for b in ("er", "ed", "all", "one")
]


def module(number: int) -> str:
    """Twelve functions, other ones for each number."""
    draw = random.Random(number)

    def word() -> str:
        return draw.choice(WORDS)

    return "\n".join(
        f"def {word()}_{number}_{i}({word()}, {word()}):\n"
        + "".join(f"    {word()} = {word()}({word()}, {word()})\n" for _ in range(6))
        + f"    return {word()}\n"
        for i in range(12)
    )  # fmt: skip


def packed(folder: Path, files: dict[str, str], language: str) -> Package:
    """An archive as pip or npm brings it, where a build looks for it."""
    content = io.BytesIO()
    if language == "python":
        with zipfile.ZipFile(content, "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)
    else:
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            for name, text in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{digest}.{'whl' if language == 'python' else 'tgz'}").write_bytes(content.getvalue())
    return Package(language, f"made-{language}", "1.0", "MIT", digest, "rows")
