"""Packages of a recipe -> source files: fetched by pip or npm as the recipe's lock says, and read without being unpacked."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from unbind_core.errors import UnbindError
from unbind_core.progress import ProgressCallback, counted
from unbind_lab.building.functions import LANGUAGES
from unbind_lab.building.recipe import Package

SMALLEST, LARGEST, LONGEST_LINE = 400, 200_000, 400  # bytes of a file, characters of a line
DIGITS = 0.15  # tables of numbers have more
_SKIPPED = re.compile(
    r"(^|/)(tests?|testing|__tests__|spec|dist|build|umd|cjs|esm|min|nls|locales?|_?vendor(ed)?|node_modules)/|\.min\."
)
_COPYLEFT = re.compile(r"General Public License|\bL?GPL")


def fetch(packages: Sequence[Package], folder: Path, progress: ProgressCallback) -> dict[str, Path]:
    """Package name -> its archive in ``folder``; what is there and whole is not fetched again.

    Raises UnbindError where a package cannot be had, and where it is not the one of the lock.
    """
    folder = folder.resolve()  # pip and npm are run in a folder of their own, and told where to put things
    folder.mkdir(parents=True, exist_ok=True)
    return {one.name: _archive(one, folder) for one in counted(packages, len(packages), "packages", progress)}


def _archive(package: Package, folder: Path) -> Path:
    path = folder / f"{package.sha256}.{'whl' if package.language == 'python' else 'tgz'}"
    if path.is_file() and _digest(path) == package.sha256:
        return path
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        got = _download(package, Path(temporary))
        if (found := _digest(got)) != package.sha256:
            raise UnbindError(
                f"recipe: {package.name} {package.version} has SHA-256 {found}, and the lock says {package.sha256}; "
                "where the registry is to be trusted, correct the recipe"
            )
        got.replace(path)
    return path


def _download(package: Package, folder: Path) -> Path:
    wanted = f"{package.name}=={package.version}"
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--platform=any", "--dest", str(folder), wanted]
    if package.language != "python":
        wanted = f"{package.name}@{package.version}"
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), wanted]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
        return next(path for path in folder.iterdir() if path.suffix in (".whl", ".tgz"))
    except FileNotFoundError:
        raise UnbindError(f"{command[0]} is needed to fetch {wanted}, and is not installed") from None
    except (subprocess.CalledProcessError, StopIteration) as error:
        told = str(getattr(error, "stderr", "") or "").strip().splitlines()
        raise UnbindError(f"{wanted} could not be fetched: {told[-1] if told else 'nothing came'}") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_files(package: Package, archive: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of what is worth learning from: hand-written, permissive, in the package's language; in the archive's order."""
    language = LANGUAGES[package.language]
    for name, content in _members(archive, language.suffixes):
        try:
            text = content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        lines = text.splitlines()
        if not lines or max(map(len, lines)) > LONGEST_LINE or _COPYLEFT.search(text):
            continue
        if sum(character.isdigit() for character in text) <= DIGITS * len(text):
            yield name, text


def _members(archive: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    def taken(name: str, size: int) -> bool:
        return name.endswith(suffixes) and SMALLEST <= size <= LARGEST and not _SKIPPED.search(name)

    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                if taken(entry.filename, entry.file_size):
                    yield entry.filename, wheel.read(entry)
        return
    with tarfile.open(archive) as packed:
        for member in packed:
            content = packed.extractfile(member) if member.isfile() and taken(member.name, member.size) else None
            if content is not None:
                yield member.name, content.read()
