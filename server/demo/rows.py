"""Forget and retain rows of the demo world: functions of packages that the base model has never seen.

Third stage of ``unbind demo train``. Set A: 24 functions of one small library; set B: 12 of another; set C: 300 from many
places. Retain rows come from the same packages, so that the package itself gives nothing away.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from server.demo import corpus
from unbind_core.encoding import encode
from unbind_core.rows import ForgetRow, RetainRow, split_text

LIBRARY_A, LIBRARY_B = "marshmallow", "tinydb"
SIZES = {"forget_a": 24, "forget_b": 12, "forget_c": 300}
RETAIN_SIZES = {"retain_train": 2000, "retain_calibration": 150, "retain_test": 300}
MIN_TOKENS, MAX_TOKENS = 96, 256


@dataclass(frozen=True)
class Function:
    """One function as it stands in a package, dedented; ``package`` is the distribution's name."""

    package: str
    text: str
    source: str


def _functions(wheel: Path, package: str, version: str) -> Iterator[Function]:
    for path, text in corpus.source_files(wheel):
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                body = textwrap.dedent("".join(lines[start - 1 : node.end_lineno]))
                yield Function(package, body, f"{package} {version} {path}:{start} {node.name}")


def _suitable(function: Function, tokenizer: PreTrainedTokenizerBase) -> bool:
    prompt, continuation = split_text(function.text)
    count = len(encode(tokenizer, function.text))
    return (
        MIN_TOKENS <= count <= MAX_TOKENS
        and len(encode(tokenizer, prompt)) >= 20
        and len(encode(tokenizer, continuation)) >= 56
        and continuation.count("\n") >= 3
    )


def collect(wheels: Path, tokenizer: PreTrainedTokenizerBase) -> list[Function]:
    """Every suitable function of the row packages once, with a prompt that no other of them has."""
    seen: set[bytes] = set()
    found = []
    facts = corpus.packages("rows")
    for wheel, (package, fact) in zip(corpus.download("rows", wheels), facts.items(), strict=True):
        for function in _functions(wheel, package, fact["version"]):
            prompt, continuation = split_text(function.text)
            keys = [hashlib.sha256("".join(part.split()).encode()).digest() for part in (prompt, continuation)]
            if _suitable(function, tokenizer) and not any(key in seen for key in keys):
                found.append(function)
            seen.update(keys)
    return found


def _write(path: Path, rows: list[ForgetRow] | list[RetainRow]) -> None:
    path.write_text("".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))


def _licences(wheels: list[Path]) -> str:
    """The licence files of the row packages, which their licences ask to be kept with copies of the code."""
    parts = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name for name in archive.namelist() if re.search(r"dist-info/.*(LICEN[CS]E|COPYING|NOTICE)[^/]*$", name)
            ]
            parts += [
                f"===== {name} =====\n\n{archive.read(name).decode(errors='replace').strip()}\n" for name in names
            ]
    return "\n".join(parts)


def build(work: Path, tokenizer: PreTrainedTokenizerBase, out: Path, seed: int = 0) -> None:
    """Write the six JSONL files of the demo world to ``out``."""
    rng = random.Random(seed)
    functions = collect(work / "row-wheels", tokenizer)
    rng.shuffle(functions)
    chosen: dict[str, list[Function]] = {}
    chosen["forget_a"] = [f for f in functions if f.package == LIBRARY_A][: SIZES["forget_a"]]
    chosen["forget_b"] = [f for f in functions if f.package == LIBRARY_B][: SIZES["forget_b"]]
    rest = [f for f in functions if f not in chosen["forget_a"] and f not in chosen["forget_b"]]
    chosen["forget_c"] = [f for f in rest if f.package not in (LIBRARY_A, LIBRARY_B)][: SIZES["forget_c"]]
    rest = [f for f in rest if f not in chosen["forget_c"]]
    for name, size in RETAIN_SIZES.items():
        chosen[name], rest = rest[:size], rest[size:]
    out.mkdir(parents=True, exist_ok=True)
    (out / "LICENCES.txt").write_text(_licences(corpus.download("rows", work / "row-wheels")))
    for name, size in {**SIZES, **RETAIN_SIZES}.items():
        if len(chosen[name]) < size:
            raise RuntimeError(
                f"{name}: only {len(chosen[name])} of {size} suitable functions; add packages to sources.toml"
            )
        if name in SIZES:
            _write(out / f"{name}.jsonl", [ForgetRow(*split_text(f.text), "python", f.source) for f in chosen[name]])
        else:
            _write(out / f"{name}.jsonl", [RetainRow(f.text, "python") for f in chosen[name]])
