"""The rules of the code, read from its source: docstrings, small files and folders, nothing set aside or left private."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from tests.support.repository import FILES, PYTHON, ROOT, TEXT, relative


def test_every_python_file_opens_with_a_docstring() -> None:
    assert not [relative(path) for path in PYTHON if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]


def test_files_and_folders_stay_small() -> None:
    own = [path for path in PYTHON if relative(path).startswith(("unbind_core/", "unbind_lab/", "server/", "tests/"))]
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in own}
    # A file of tests may be as long as what it tests has cases; beyond that its tests are of two things.
    most = {name: 450 if name.startswith(("tests/server/", "tests/system/")) else 300 for name in lines}
    assert not {name: count for name, count in lines.items() if count >= most[name]}
    folders = Counter(relative(path.parent) for path in own)
    assert not {folder: count for folder, count in folders.items() if count > 20}


def test_scripts_of_the_console_are_small_modules_that_name_no_other_host() -> None:
    own = [path for path in FILES if relative(path).startswith("server/console/app/")]
    assert own and {path.suffix for path in own} == {".js"}
    texts = {relative(path): path.read_text(encoding="utf-8") for path in own}
    assert not {name: lines for name, text in texts.items() if (lines := len(text.splitlines())) >= 300}
    assert not [name for name, text in texts.items() if not text.startswith("// ")]  # what it is for
    foreign = re.compile(r"https?://|innerHTML|\bstyle=[\"']|\beval\(")
    assert not [name for name, text in texts.items() if foreign.search(text)]


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


def test_no_slow_test_is_left_out_of_the_whole_check() -> None:
    """Its paths stand one by one: where one holds another, pytest runs all in the order of their names, and the longest last."""
    named = (ROOT / ".ci/run").read_text(encoding="utf-8").split("pytest -m slow")[1].split()
    paths = [ROOT / path for path in named if path.startswith("tests/")]
    assert len(paths) > 3 and all(path.exists() for path in paths)
    assert not [one for one in paths for other in paths if one != other and one.is_relative_to(other)]
    marked = [path for path in PYTHON if relative(path).startswith("tests/") and "mark.slow" in path.read_text()]
    own = {Path(__file__), ROOT / "tests/support/markers.py"}
    left = [relative(path) for path in marked if path not in own and not any(path.is_relative_to(p) for p in paths)]
    assert not left
