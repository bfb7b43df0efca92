"""What a world is made of: pinned packages, whole functions, no near duplicates; recipes that say what is wrong with them."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from server.demo import corpus
from tests.lab.packed import module, packed
from unbind_core.errors import UnbindError
from unbind_core.progress import silent
from unbind_lab.building.duplicates import ALIKE, RUN, Seen
from unbind_lab.building.functions import functions
from unbind_lab.building.packages import fetch, source_files
from unbind_lab.building.recipe import Recipe, names

JAVASCRIPT = """import x from "y";
export function one(a, b) {
  return a + b;
}
class K {
    go(z) {
        return z.map((q) => { return q + 1; });
    }
}
K.prototype.next = function () {
  return 1;
};
const f = (a) => {
  return a;
};
call(function () { return 3; });
module.exports = {
  size: function (x) {
    return x;
  },
};
"""
PYTHON = """import a
class K:
    @cached
    def go(self):
        return [lambda: 1]
def two(): return 3
"""


def test_functions_are_whole_dedented_and_have_a_name() -> None:
    found = list(functions("javascript", JAVASCRIPT))
    assert [(one.line, one.text.splitlines()[0]) for one in found] == [
        (2, "export function one(a, b) {"),
        (6, "go(z) {"),
        (10, "K.prototype.next = function () {"),
        (13, "const f = (a) => {"),
        (18, "size: function (x) {"),
    ]
    assert found[1].text == "go(z) {\n    return z.map((q) => { return q + 1; });\n}\n"
    assert [one.text for one in functions("python", PYTHON)] == [
        "@cached\ndef go(self):\n    return [lambda: 1]\n",
        "def two(): return 3\n",
    ]
    assert not list(functions("python", "def broken(:\n    pass\n"))


def slow_near(one: str, other: str) -> bool:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+|[^\w\s]", text)
        return {tuple(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}

    a, b = runs(one), runs(other)
    return len(a & b) >= ALIKE * min(len(a), len(b))


def test_near_duplicates_are_those_of_the_definition_whatever_the_layout() -> None:
    draw = random.Random(0)
    texts = [" ".join(draw.choice("abc") for _ in range(draw.randrange(8, 20))) for _ in range(120)]
    seen: list[str] = []
    fast = Seen()
    hits = 0
    for text in texts:
        near = any(slow_near(text, other) for other in seen)
        assert fast.near(text) == near
        hits += near
        fast.add(text)
        seen.append(text)
    assert 5 < hits < 115
    fast.add("def area(self):\n    return self.width * self.height\n")
    assert fast.near("def area(self):\n\treturn (\n\t\tself.width * self.height\n\t)\n")


def test_the_shipped_recipes_are_pinned_permissive_and_know_no_row() -> None:
    known = {re.sub(r"[-_.]", "-", name).lower() for name in corpus.packages("corpus")}
    for name in names():
        recipe = Recipe.load(name)
        for package in recipe.packages:
            assert re.fullmatch(r"[0-9a-f]{64}", package.sha256) and package.version
            assert not re.search("GPL|General Public|proprietary", package.licence)
        digests = Counter(package.sha256 for package in recipe.packages)
        assert set(digests.values()) == {1} or recipe.manifests
        if recipe.base.folder == "server/demo/base":
            assert not known & {re.sub(r"[-_.]", "-", one.name).lower() for one in recipe.of("rows")}
    built = [recipe for name in names() if not (recipe := Recipe.load(name)).manifests]
    assert len({"qwen2" if recipe.base.folder else recipe.base.family for recipe in built}) >= 2
    assert len({recipe.language for recipe in built}) >= 2


def test_a_recipe_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    with pytest.raises(UnbindError, match=r"neither a file nor one of .*micro-javascript, micro-python"):
        Recipe.load("micro")
    good = 'language = "python"\n[adaptation]\nepochs = 1\nretain_slots = 1\nlearning_rate = 1e-3\n'
    for text, told in (
        ("language = 3 4", "is not TOML"),
        ("seed = 0", "'language' is missing"),
        (good + "[sizes]\nforgets = 3\n", "'sizes.forgets' is unknown; choose from least_tokens"),
        ('language = "python"\n[adaptation]\nepochs = 1\n', "adaptation: .*retain_slots"),
        (good + '[rows.python]\nx = {version = "1", licence = "MIT"}\n', "'sha256' is missing"),
    ):
        path.write_text(text)
        with pytest.raises(UnbindError, match=told):
            Recipe.load(str(path))
    facts = '{version = "1", licence = "MIT", sha256 = "0"}'
    path.write_text(good + f"[rows.python]\nx = {facts}\n[corpus.python]\nx = {facts}\n")
    with pytest.raises(UnbindError, match="x is in corpus and in rows"):
        Recipe.load(str(path))


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_what_is_no_hand_written_permissive_source_is_left_out(tmp_path: Path, language: str) -> None:
    end = {"python": "py", "javascript": "js"}[language]
    long = "value = compute(value)\n" * 40
    files = {
        f"lib/good.{end}": long,
        f"lib/small.{end}": "x = 1\n",
        f"lib/wide.{end}": long + "y = '" + "a" * 500 + "'\n",
        f"lib/table.{end}": "[" + "1234567, " * 30 + "]\n" + "12345678\n" * 80,
        f"lib/copyleft.{end}": "# GNU General Public License\n" + long,
        f"tests/of.{end}": long,
        f"dist/bundle.min.{end}": long,
        "lib/readme.md": long,
    }
    package = packed(tmp_path, files, language)
    archives = fetch([package], tmp_path, silent)
    assert [name for name, _ in source_files(package, archives[package.name])] == [f"lib/good.{end}"]


def test_a_package_comes_by_pip_and_is_refused_where_it_is_not_the_lock_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, into = tmp_path / "links", tmp_path / "packages"
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing is asked for elsewhere
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    about = "Metadata-Version: 2.1\nName: made-python\nVersion: 1.0\n"
    files = {
        "made/a.py": module(0),
        "made_python-1.0.dist-info/METADATA": about,
        "made_python-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "made_python-1.0.dist-info/RECORD": "",
    }
    package = packed(links, files, "python")
    (links / f"{package.sha256}.whl").rename(links / "made_python-1.0-py3-none-any.whl")
    found = fetch([package], into, silent)[package.name]
    assert found == into / f"{package.sha256}.whl"
    found.write_bytes(b"damaged")
    assert fetch([package], into, silent)[package.name].read_bytes() != b"damaged"
    found.unlink()
    monkeypatch.chdir(tmp_path)  # pip runs in another folder, so that a relative one must be found from there
    assert fetch([package], Path("packages"), silent)[package.name].samefile(found)
    other = replace(package, sha256="0" * 64)
    with pytest.raises(UnbindError, match=f"made-python 1.0 has SHA-256 {package.sha256}, and the lock says 0000"):
        fetch([other], into, silent)
    with pytest.raises(UnbindError, match=r"made-python==2\.0 could not be fetched: ERROR: No matching distribution"):
        fetch([replace(other, version="2.0")], into, silent)
    assert [path.name for path in into.iterdir()] == [f"{package.sha256}.whl"]
