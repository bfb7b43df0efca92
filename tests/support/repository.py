"""The repository as the house tests read it: its files, its Python sources and what they import."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".sh", ".lock", ".cfg", ".html", ".js", ".css", ""}


def tracked() -> list[Path]:
    """The files of the repository; of the folder, where it is not a checkout (an unpacked source archive)."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        names = subprocess.run(
            [git, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]


FILES = tracked()
PYTHON = [path for path in FILES if path.suffix == ".py"]


def relative(path: Path) -> str:
    """How a file is named in test ids and messages."""
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Dotted names of every module that a file imports, at any depth of its code."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def files_of(package: str) -> list[Path]:
    """The Python files of a package, or the one file of a module."""
    base = package.replace(".", "/")
    return [path for path in PYTHON if relative(path) == f"{base}.py" or relative(path).startswith(f"{base}/")]
