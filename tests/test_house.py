"""The rules of the code, read from its source: who imports whom, docstrings, nothing set aside or left private."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.repository import FILES, PYTHON, ROOT, TEXT, files_of, imports, inside, relative

# package -> what of this project it may import, besides itself
MAY_IMPORT = {
    "unbind_core": [],
    "server.engine": ["unbind_core"],
    "server.registry": ["server.settings", "server.rules", "unbind_core"],
    "server.worker": [
        "server.registry",
        "server.settings",
        "server.rules",
        "server.logs",
        "server.allocator",
        "unbind_core",
    ],
    "server.evidence": ["server.registry", "server.settings", "server.rules"],
    "server.rules": [],
    "server.logs": [],
    "server.allocator": [],
    "server.settings": ["server.rules"],
    "server.demo": ["unbind_core"],
}
# what it must not import, where the rest is open
MUST_NOT_IMPORT = {
    "server.api": ["server.worker", "server.cli"],
    "server.policy": ["server.api", "server.worker", "server.cli"],
    "server.telemetry": ["server.api", "server.worker", "server.cli"],
    "server.errors": ["server.api", "server.worker", "server.cli"],
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    allowed = [package, *MAY_IMPORT[package]]
    wrong = [
        f"{relative(path)} imports {name}"
        for path in files_of(package)
        for name in imports(path)
        if (inside(name, "server") or inside(name, "unbind_core"))
        and name != "server"  # `from server import x` is judged by `server.x`
        and not any(inside(name, one) for one in allowed)
    ]
    assert not wrong


@pytest.mark.parametrize("package", MUST_NOT_IMPORT)
def test_a_layer_does_not_import_what_stands_above_it(package: str) -> None:
    wrong = [
        f"{relative(path)} imports {name}"
        for path in files_of(package)
        for name in imports(path)
        if any(inside(name, one) for one in MUST_NOT_IMPORT[package])
    ]
    assert not wrong


def test_the_method_knows_neither_http_nor_databases() -> None:
    foreign = {
        "fastapi",
        "starlette",
        "uvicorn",
        "httpx",
        "httpx2",
        "http",
        "requests",
        "sqlalchemy",
        "sqlite3",
        "typer",
    }
    imported = {(relative(path), name.split(".")[0]) for path in files_of("unbind_core") for name in imports(path)}
    assert not [f"{path} imports {name}" for path, name in imported if name in foreign]


def test_the_scheduler_decides_without_tensors() -> None:
    assert not [name for name in imports(ROOT / "server/engine/scheduler.py") if inside(name, "torch")]


def test_every_python_file_opens_with_a_docstring() -> None:
    assert not [relative(path) for path in PYTHON if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]


def test_no_tests_are_set_aside() -> None:
    marks = re.compile(r"pytest\.(?:mark\.)?(?:skip|skipif|xfail|importorskip)\b")
    tests = [path for path in PYTHON if relative(path).startswith("tests/") and path != Path(__file__)]
    assert not [relative(path) for path in tests if marks.search(path.read_text(encoding="utf-8"))]


def test_nothing_unfinished_is_left_in_the_code() -> None:
    unfinished = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX|NotImplemented" r"Error)\b")
    assert not [relative(path) for path in PYTHON if unfinished.search(path.read_text(encoding="utf-8"))]


def test_files_name_no_private_path_host_or_secret() -> None:
    private = re.compile(
        r"/(?:work|root|home/\w+)/\w|/opt/\w|(?:pypi|pythonhosted)\.org/simple"
        r"|sk-[A-Za-z0-9]{20,}|BEGIN [A-Z ]*PRIVATE KEY"
    )
    # The demo's rows are other people's code and the licence is the foundation's text.
    theirs = {path for path in FILES if relative(path).startswith("server/demo/rows/")} | {ROOT / "LICENSE"}
    checked = [path for path in FILES if path.suffix in TEXT and path not in {*theirs, Path(__file__)}]
    found = [(relative(path), private.findall(path.read_text(encoding="utf-8"))) for path in checked]
    assert not [(path, matches) for path, matches in found if matches]
