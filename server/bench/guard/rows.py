"""What is protected and what is ordinary: the demo's rows, and the sources of packages that are installed."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from server import demo
from unbind_core.errors import UnbindError
from unbind_core.guard.index import Secret
from unbind_core.rows import parse_forget, parse_retain, split_text

# Under MIT, BSD, Apache or PSF licences.
PACKAGES = (
    *("numpy", "torch", "transformers", "sqlalchemy", "pydantic", "fastapi", "starlette", "uvicorn", "jinja2", "rich"),
    *(
        "typer",
        "click",
        "alembic",
        "safetensors",
        "peft",
        "fsspec",
        "httpx2",
        "prometheus_client",
        "psutil",
        "pygments",
    ),
)
MOST_BYTES = 300_000  # of a file: longer ones are tables
SECRET = Secret(b"the key of a benchmark")


def forget_texts(sets: str = "abc") -> list[str]:
    """Every row of the demo's forget sets, prompt and continuation together."""
    found = []
    for name in sets:
        path = demo.ROWS / f"forget_{name}.jsonl"
        rows = parse_forget(path, path.name)
        found += [row.prompt + row.continuation for row in rows]
    return found


def retain_test() -> list[tuple[str, str]]:
    """The demo's held-out rows, as prompt and continuation."""
    path = demo.RETAIN_TEST
    return [split_text(row.text) for row in parse_retain(path, path.name)]


def sources(seed: int) -> list[Path]:
    """Python files of the standard library and of permissively licensed packages, as far as they are here, in a drawn order."""
    folders = [Path(sysconfig.get_paths()["stdlib"])]
    for name in PACKAGES:
        spec = find_spec(name)
        folders += [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = sorted(
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if "site-packages" not in path.relative_to(folder).parts and path.stat().st_size <= MOST_BYTES
    )
    random.Random(seed).shuffle(found)
    return found


def texts(files: Sequence[Path]) -> Iterator[str]:
    """What they say, where that is UTF-8."""
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def windows(files: Sequence[Path], lines: int, rows: int) -> list[str]:
    """So many rows of so many lines each, not empty ones counted, no two from the same lines. Raises UnbindError for too few."""
    found: list[str] = []
    for text in texts(files):
        code = [line for line in text.splitlines() if line.strip()]
        found += ["\n".join(code[at : at + lines]) + "\n" for at in range(0, len(code) - lines + 1, lines)]
        if len(found) >= rows:
            return found[:rows]
    raise UnbindError(f"the installed sources make only {len(found)} rows of {lines} lines; ask for fewer")


def json_rows(sets: str) -> list[dict[str, str]]:
    """Rows of the demo's forget sets as a takedown takes them."""
    lines = [
        line for name in sets for line in (demo.ROWS / f"forget_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [json.loads(line) for line in lines if line.strip()]
