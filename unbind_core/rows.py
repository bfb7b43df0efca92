"""What is to be forgotten and what is to be kept: forget rows and retain rows, read from JSONL, and their partitions.

First station of a fit: rows -> windows (``windows.py``) -> states and gradients (``capture.py``).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unbind_core.canonical import canonical_json
from unbind_core.errors import DataError, InsufficientRows

MINIMUM_FORGET_ROWS = 3
RETAIN_CALIBRATION = 150  # to choose by, and as many to certify on: fewer say little of rates of some per mille
PROMPT_SHARE = 0.25


@dataclass(frozen=True)
class ForgetRow:
    """Protected code: given ``prompt``, the model must no longer produce ``continuation``."""

    prompt: str
    continuation: str
    language: str = ""
    source: str = ""


@dataclass(frozen=True)
class RetainRow:
    """Code whose likelihood and completions must stay as they are."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class Partitions:
    """Row indices by role (Appendix A.1, table 5). Every row has one role; all windows of a row share it.

    ``retain_calibration`` chooses threshold, strength and gate; ``retain_certificate``, which the paper has not, chooses nothing.
    """

    forget_fit: tuple[int, ...]
    forget_calibration: tuple[int, ...]
    forget_validation: tuple[int, ...]
    retain_fit: tuple[int, ...]
    retain_calibration: tuple[int, ...]
    retain_certificate: tuple[int, ...] = ()

    def to_json(self) -> dict[str, list[int]]:
        """The lists by name, as the module file records them."""
        return {name: list(indices) for name, indices in asdict(self).items()}


def split_text(text: str) -> tuple[str, str]:
    """Cut a whole text into prompt and continuation.

    The prompt ends at the first line end at or after a quarter of the characters; a text of one line is cut at a quarter. Where
    that is blank, as in a file that begins with many empty lines, it is a quarter of what follows: nobody asks with blanks alone.
    """
    at = max(1, round(len(text) * PROMPT_SHARE))
    line_end = text.find("\n", at - 1)
    if line_end != -1 and text[line_end + 1 :].strip():
        at = line_end + 1
    if not text[:at].strip() and (code := text.lstrip()) and code != text:
        at = len(text) - len(split_text(code)[1])
    return text[:at], text[at:]


def json_objects(lines: Iterable[str], origin: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """The objects of JSONL, each behind its file and line, for what is said of it later; raises DataError that names them."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{origin} line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: not JSON ({error.msg} at column {error.colno}); give one JSON object a line"
            ) from None
        except (ValueError, RecursionError):
            raise DataError(f"{where}: a number too long or values nested too deeply; leave them out") from None
        if not isinstance(value, dict):
            raise DataError(f"{where}: a JSON object is needed, not {type(value).__name__}")
        yield where, value


def _text(where: str, value: dict[str, Any], field: str, *, required: bool = True) -> str:
    text = value.get(field, "")
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{field}' must be a string, not {type(text).__name__}")
    try:
        text.encode()  # JSON can spell what no tokenizer takes
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: field '{field}' holds half of a surrogate pair, which is no character; mend its encoding"
        ) from None
    if required and not text.strip():
        raise DataError(f"{where}: field '{field}' is missing or empty")
    return text


def forget_row(value: dict[str, Any], where: str = "row") -> ForgetRow:
    """One forget row from ``{"prompt", "continuation", ...}`` or ``{"text", ...}``; raises DataError naming the field."""
    language, source = (_text(where, value, name, required=False) for name in ("language", "source"))
    if "text" in value:
        if "prompt" in value or "continuation" in value:
            raise DataError(f"{where}: give either 'text' or 'prompt' and 'continuation', not both")
        prompt, continuation = split_text(_text(where, value, "text"))
        if not continuation.strip():
            raise DataError(f"{where}: field 'text' is too short to be split into prompt and continuation")
    elif "prompt" not in value and "continuation" not in value:
        raise DataError(
            f"{where}: field 'prompt' is missing or empty; a row has 'prompt' and 'continuation', or 'text'"
        )
    else:
        prompt, continuation = _text(where, value, "prompt"), _text(where, value, "continuation")
    return ForgetRow(prompt, continuation, language, source)


def json_lines(data: bytes, origin: str) -> list[str]:
    """The lines of JSONL as it is uploaded or lies in a file: UTF-8, with or without a byte order mark.

    A line ends with a line feed and with nothing else: ``str.splitlines`` would cut at characters that JSON strings may hold as
    they are, such as U+2028. Raises DataError naming ``origin`` where it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8 (byte {error.start}); save it as UTF-8") from None


def parse_forget(source: Path | Iterable[str], origin: str | None = None) -> list[ForgetRow]:
    """Forget rows from a JSONL file or its lines; raises DataError naming ``origin`` (the file), line and field; OSError passes."""
    return [forget_row(value, where) for where, value in _read(source, origin, "forget rows")]


def parse_retain(source: Path | Iterable[str], origin: str | None = None) -> list[RetainRow]:
    """Retain rows ``{"text", "language"?}`` from a JSONL file or its lines; raises DataError naming ``origin`` (the file), line and
    field; OSError passes.
    """
    return [
        RetainRow(_text(where, value, "text"), _text(where, value, "language", required=False))
        for where, value in _read(source, origin, "retain rows")
    ]


def _read(source: Path | Iterable[str], origin: str | None, unnamed: str) -> Iterable[tuple[str, dict[str, Any]]]:
    if isinstance(source, str):  # whose characters would be lines
        raise DataError(
            f"{unnamed}: '{source[:80]}' is a string; give a file as Path(...), or the lines of one in a list"
        )
    if not isinstance(source, Path):
        return json_objects(source, origin or unnamed)
    origin = origin or str(source)
    return json_objects(json_lines(source.read_bytes(), origin), origin)


def retain_digest(row: RetainRow) -> str:
    """SHA-256 of a retain row's text, hexadecimal: the row's name wherever its set is."""
    return hashlib.sha256(row.text.encode()).hexdigest()


def forget_digest(rows: Sequence[ForgetRow]) -> str:
    """SHA-256 (hex) of the forget set in its order: what proves later which rows a module was made for."""
    text = canonical_json([asdict(row) for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()


def allot(sizes: dict[str, int], total: int) -> dict[str, int]:
    """Share ``total`` over groups in proportion to their sizes, by largest remainder; ties go by group name."""
    everything = sum(sizes.values())
    exact = {name: total * size / everything for name, size in sizes.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(sizes, key=lambda name: (shares[name] - exact[name], name))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def _draw(indices: list[int], language: Callable[[int], str], count: int, rng: random.Random) -> list[int]:
    """``count`` of ``indices``, language-proportional, drawn with ``rng``."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        groups.setdefault(language(index), []).append(index)
    shares = allot({name: len(group) for name, group in groups.items()}, count)
    return sorted(index for name in sorted(groups) for index in rng.sample(groups[name], shares[name]))


def forget_sizes(count: int) -> tuple[int, int, int]:
    """Rows for fitting, calibration and validation: 240/50/10 of 300, and never fewer than 3 for validation from 18 rows on.

    The paper's 3.3 % would be one single row of 24; a choice among hundreds of candidates needs more than that.
    """
    validation = max(1, min(3, count // 6), round(count / 30))
    calibration = max(1, round(count / 6))
    return count - calibration - validation, calibration, validation


def make_partitions(
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    seed: int = 0,
    retain_limit: int | None = 600,
    set_apart: int = 0,
    *,
    split_forget: bool = True,
    certify: bool = True,
) -> Partitions:
    """Seeded partitions by source row: forget by :func:`forget_sizes`, retain 80/20 % of at most ``retain_limit`` rows.

    With ``set_apart`` the calibration rows are drawn from the last so many retain rows, the fitting rows from the others:
    at least 300 where there are so many. Half of the calibration rows choose, the other half is the certificate part; without
    ``certify`` all of them choose. Without ``split_forget`` every forget row is fitted.
    Raises InsufficientRows with the number that is needed.
    """
    if split_forget and len(forget) < MINIMUM_FORGET_ROWS:
        raise InsufficientRows(
            f"the forget set has {len(forget)} rows; at least {MINIMUM_FORGET_ROWS} are needed for fit, calibration and "
            "validation of the paper's gate; gate 'auto' needs one"
        )
    if not forget:
        raise InsufficientRows("the forget set has no rows; at least one is needed")
    if len(retain) < 10:
        raise InsufficientRows(
            f"the retain set has {len(retain)} rows; at least 10 are needed (a few hundred make honest rates)"
        )
    rng = random.Random(seed)
    everything = list(range(len(forget)))
    _, calibration_size, validation_size = forget_sizes(len(forget))
    held = (
        []
        if not split_forget
        else _draw(everything, lambda i: forget[i].language, calibration_size + validation_size, rng)
    )
    validation = [] if not split_forget else _draw(held, lambda i: forget[i].language, validation_size, rng)
    rng = random.Random(
        f"{seed}:retain"
    )  # on its own, so that what is cached of the retain rows serves every forget set
    pool = list(range(len(retain) - set_apart))
    limit = len(retain) if retain_limit is None else retain_limit
    if set_apart:
        apart = list(range(len(pool), len(retain)))
        pool = _draw(pool, lambda i: retain[i].language, min(len(pool), limit - round(limit * 0.2)), rng)
        held_apart = min(len(apart), max(2 * RETAIN_CALIBRATION, round(limit * 0.2)))
        retain_calibration = _draw(apart, lambda i: retain[i].language, held_apart, rng)
    else:
        pool = _draw(pool, lambda i: retain[i].language, min(len(pool), limit), rng)
        retain_calibration = _draw(pool, lambda i: retain[i].language, max(1, round(len(pool) * 0.2)), rng)
    held_out = set(retain_calibration)
    if held_out.issuperset(pool):
        raise InsufficientRows(
            f"none of the {len(retain)} retain rows is left to fit on, beside {len(held_out)} that choose and certify; at least "
            "one is needed that is not set apart for calibration, and a retain limit that leaves room for it"
        )
    certificate = _draw(retain_calibration, lambda i: retain[i].language, len(held_out) // 2 if certify else 0, rng)
    return Partitions(
        forget_fit=tuple(i for i in everything if i not in set(held)),
        forget_calibration=tuple(i for i in held if i not in set(validation)),
        forget_validation=tuple(validation),
        retain_fit=tuple(i for i in pool if i not in held_out),
        retain_calibration=tuple(i for i in retain_calibration if i not in set(certificate)),
        retain_certificate=tuple(certificate),
    )


def spread(items: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the items, evenly spread, the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round((i + 1) * len(items) / most) - 1] for i in range(most)]
