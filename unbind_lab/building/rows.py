"""The row files of a setting: functions of packages, no two of all rows near duplicates, each of a known place; or the rows of
manifests as they are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from unbind_core.encoding import encode
from unbind_core.errors import UnbindError
from unbind_core.files import write_text
from unbind_core.progress import ProgressCallback, counted
from unbind_core.rows import ForgetRow, RetainRow, json_lines, parse_forget, parse_retain, split_text
from unbind_lab.building.duplicates import Seen
from unbind_lab.building.functions import functions
from unbind_lab.building.packages import source_files
from unbind_lab.building.recipe import Package, Recipe, Sizes

FORGET = ("forget", "forget_validation", "forget_unseen")
RETAIN = ("retain_training", "retain_validation", "retain")
ROLES = (*FORGET, *RETAIN)
LEAST_PROMPT, LEAST_CONTINUATION = 12, 32  # tokens
MOST_OF_A_PACKAGE = 0.15  # of all rows, so that no package is the retain side


@dataclass(frozen=True)
class Candidate:
    """A function that may be a row."""

    text: str
    language: str
    source: str


def build(
    recipe: Recipe,
    archives: Mapping[str, Path],
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    progress: ProgressCallback,
) -> None:
    """Write the six files to ``out``. Raises UnbindError where the packages hold too few suitable functions."""
    sizes, wanted = recipe.sizes, _wanted(recipe.sizes)
    rng = random.Random(recipe.seed)
    packages = recipe.of("rows")
    found: list[Candidate] = []
    for package in counted(packages, len(packages), "functions", progress):
        own = [one for one in _functions(package, archives[package.name]) if _suitable(one.text, tokenizer, sizes)]
        rng.shuffle(own)
        found += own[: round(MOST_OF_A_PACKAGE * sum(wanted.values()))]
    rng.shuffle(found)
    found.sort(key=lambda one: one.language != recipe.language)  # the rows to forget are taken first
    seen, names = Seen(), [name for name, size in wanted.items() for _ in range(size)]
    chosen: dict[str, list[Candidate]] = {name: [] for name in wanted}
    for one in found:
        if names and not seen.near(one.text):
            seen.add(one.text)
            chosen[names.pop(0)].append(one)
    if names:
        had = sum(map(len, chosen.values()))
        raise UnbindError(f"recipe: {had} suitable functions, and {sum(wanted.values())} are needed; add packages")
    _write(out, {name: [_row(name, one) for one in candidates] for name, candidates in chosen.items()})


def taken_over(recipe: Recipe, manifests: Mapping[str, Path], out: Path) -> int:
    """Write the rows of the recipe's ``manifests`` to ``out``, in their order.

    Returns how many retain rows are near duplicates of rows to forget, which are kept: whoever froze the manifests chose them.
    Raises UnbindError where a manifest is no UTF-8 or has another number of rows than the recipe says, DataError naming its line.
    """
    found: dict[str, Sequence[ForgetRow | RetainRow]] = {}
    for name, size in _wanted(recipe.sizes).items():
        path = manifests[name]
        found[name] = (parse_forget if name in FORGET else parse_retain)(path, path.name)
        if len(found[name]) != size:
            raise UnbindError(
                f"manifests: {path} has {len(found[name])} rows, and the recipe says sizes.{name} = {size}; correct one of them"
            )
    seen = Seen()
    for row in found["forget"]:
        assert isinstance(row, ForgetRow)
        seen.add(row.prompt + row.continuation)
    _write(out, found)
    return sum(isinstance(row, RetainRow) and seen.near(row.text) for name in RETAIN for row in found[name])


def manifests_of(recipe: Recipe, folder: Path | None) -> dict[str, Path]:
    """The recipe's manifests by the role of their rows; none where it has rows of packages.

    Raises UnbindError where the recipe, the folder and what is in it do not agree.
    """
    named = recipe.manifests
    if not named and folder is None:
        return {}
    if not named:
        raise UnbindError(f"recipe: {recipe.name} has no manifests; leave --manifests out")
    if folder is None:
        raise UnbindError(f"recipe: {recipe.name} has its rows from manifests; say where they are: --manifests FOLDER")
    for role in named.keys() - set(ROLES):
        raise UnbindError(f"recipe: 'manifests.{role}' is unknown; choose from {', '.join(ROLES)}")
    if missing := [role for role in ROLES if role not in named]:
        raise UnbindError(f"recipe: 'manifests.{missing[0]}' is missing")
    found: dict[str, Path] = {}
    for role in ROLES:
        found[role] = folder / named[role]
        if not found[role].is_file():
            raise UnbindError(f"manifests: '{found[role]}' is not there; it holds the rows of {recipe.name} for {role}")
    return found


def _write(out: Path, rows: Mapping[str, Sequence[ForgetRow | RetainRow]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, found in rows.items():
        write_text(out / f"{name}.jsonl", "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in found))


def _wanted(sizes: Sizes) -> dict[str, int]:
    return {name: int(getattr(sizes, name)) for name in ROLES}


def _row(name: str, one: Candidate) -> ForgetRow | RetainRow:
    if name in FORGET:
        return ForgetRow(*split_text(one.text), one.language, one.source)
    return RetainRow(one.text, one.language)


def _functions(package: Package, archive: Path) -> Iterator[Candidate]:
    for path, text in source_files(package, archive):
        for function in functions(package.language, text):
            source = f"{package.name} {package.version} {path}:{function.line} ({package.licence})"
            yield Candidate(function.text, package.language, source)


def _suitable(text: str, tokenizer: PreTrainedTokenizerBase, sizes: Sizes) -> bool:
    prompt, continuation = split_text(text)
    return (
        sizes.least_tokens <= len(encode(tokenizer, text)) <= sizes.most_tokens
        and len(encode(tokenizer, prompt)) >= LEAST_PROMPT
        and len(encode(tokenizer, continuation)) >= LEAST_CONTINUATION
        and continuation.count("\n") >= 2
    )


def read(folder: Path, names: Sequence[str]) -> list[str]:
    """The lines of these files, one after the other."""
    files = [folder / f"{name}.jsonl" for name in names]
    return [line for file in files for line in json_lines(file.read_bytes(), file.name)]
