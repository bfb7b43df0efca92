"""Print a lock: the exact version of every package that pyproject.toml leads to, read from this environment.

Only what the project needs, directly or not, is listed, so that tools somebody installed by hand never enter. Versions
carry no local label (``2.13.0+cpu`` is written ``2.13.0``): which build of it arrives is the package index's business.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEADER = "# Exact versions for Python 3.11, written by `make lock`; pyproject.toml holds the ranges."


def closure(requirements: list[str]) -> dict[str, str]:
    """Map every package reached from ``requirements`` to its installed version; SystemExit names a missing one."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(Requirement(text), "") for text in requirements]
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            remedy = f"run `.venv/bin/pip install '{requirement}'`"
            raise SystemExit(f"{name} is needed but not installed: {remedy}") from None
        if requirement.specifier and not requirement.specifier.contains(package.version, prereleases=True):
            raise SystemExit(f"{name} {package.version} is installed, but {requirement} is needed")
        found[name] = package.version.split("+")[0]
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                queue += [(Requirement(text), wanted) for text in package.requires or ()]
    return found


def main() -> None:
    """Read pyproject.toml beside this folder and print the lock."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    wanted = [text for part in (project["dependencies"], *project["optional-dependencies"].values()) for text in part]
    sys.stdout.write("\n".join([HEADER, *(f"{name}=={version}" for name, version in sorted(closure(wanted).items()))]))
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
