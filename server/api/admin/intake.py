"""A posted forget set -> rows: JSON rows, JSONL, or an archive of source files.

Every refusal is a DataError that names the row or file. Limits are checked while reading, so that a small upload cannot become a
large one. How archives are read: ``archives.py``. How files become rows: see ``pieces``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

from server.api.admin.archives import shown, tar_files, zip_files
from unbind_core.errors import DataError, InsufficientRows
from unbind_core.rows import ForgetRow, forget_row, json_lines, json_objects

MAX_ROWS = 100_000
MAX_ROW_CHARACTERS = 200_000
PIECE_LINES = 60
SHORTEST_PIECE_LINES = 20
PIECE_CHARACTERS = 8_000  # code that was made smaller has thousands in a line
LEAST_LINE = 200  # characters with which a line alone is a row
MAX_GLOBS, MAX_GLOB_CHARACTERS = 100, 1000  # reading one takes the square of its characters
ROW_FILES = (".jsonl", ".ndjson")  # in an archive they would be cut into rows as if they were source code
LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # where str.splitlines cuts


@dataclass(frozen=True)
class Intake:
    """A forget set that can be used, and what was left out of it.

    ``places``: where each row stands in what was sent, duplicates and blank lines counted: its line, its index or its file.
    ``cut``: of what was sent, how many rows were one text, or a part of a file, and so were cut into prompt and continuation here.
    ``short``: the files of one short line, which make no row.
    """

    rows: list[ForgetRow]
    places: list[str]
    duplicates_dropped: int
    files_skipped: int = 0
    cut: int = 0
    short: tuple[str, ...] = ()


NO_ROWS = Intake([], [], 0)


def from_json(rows: Sequence[dict[str, Any]]) -> Intake:
    """Rows of a JSON body, which has some unless others' are joined."""
    if not rows:
        return NO_ROWS
    placed = [(f"rows.{index}", forget_row(row, f"rows.{index}")) for index, row in enumerate(rows)]
    return checked(placed, cut=sum("text" in row for row in rows))


def from_upload(data: bytes, include: Sequence[str], exclude: Sequence[str]) -> Intake:
    """Rows of an uploaded file: .zip, .tar.gz or JSONL, told apart by content."""
    for option, globs in (("include", include), ("exclude", exclude)):
        if len(globs) > MAX_GLOBS or any(len(glob) > MAX_GLOB_CHARACTERS for glob in globs):
            raise DataError(
                f"{option}: at most {MAX_GLOBS} patterns of {MAX_GLOB_CHARACTERS} characters are taken; give fewer or shorter ones"
            )
    if data[:4] == b"PK\x03\x04":
        return _from_files(zip_files(data), include, exclude)
    if data[:2] == b"\x1f\x8b":
        return _from_files(tar_files(data), include, exclude)
    if not data.strip():
        raise DataError("file: it is empty; give JSONL, .zip or .tar.gz")
    if b"\x00" in data:
        raise DataError("file: binary, but neither .zip nor .tar.gz; give JSONL in UTF-8, or one of these")
    lines = json_lines(data, "file")
    _check_rows(sum(bool(line.strip()) for line in lines))
    if any(include) or any(exclude):
        option = "include" if any(include) else "exclude"
        raise DataError(
            f"{option}: chooses files of an archive, and this is JSONL, of which every row is taken; leave it out"
        )
    placed: list[tuple[str, ForgetRow]] = []
    cut = 0
    try:
        for where, value in json_objects(lines, "file"):
            placed.append((where, forget_row(value, where)))
            cut += "text" in value
    except DataError as error:
        if placed or data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[", b'"'):
            raise
        raise DataError(
            f"{error}. Source code is given as .zip or .tar.gz, also one file alone (tar czf rows.tar.gz FILE), and cut into rows"
        ) from None
    return checked(placed, cut=cut)


def checked(
    rows: Sequence[tuple[str, ForgetRow]], files_skipped: int = 0, cut: int = 0, short: tuple[str, ...] = ()
) -> Intake:
    """The forget set of rows with where each stands. Raises DataError."""
    _check_rows(len(rows))
    kept: dict[tuple[str, str], tuple[str, ForgetRow]] = {}
    for where, row in rows:
        if len(row.prompt) + len(row.continuation) > MAX_ROW_CHARACTERS:
            raise DataError(f"{where}: longer than {MAX_ROW_CHARACTERS} characters; split it into several rows")
        if "\x00" in row.prompt or "\x00" in row.continuation:
            raise DataError(f"{where}: holds a NUL character, so it is not text; leave it out")
        kept.setdefault((row.prompt, row.continuation), (where, row))
    if not kept:
        raise InsufficientRows("rows: none given; at least one is needed")
    places, different = zip(*kept.values(), strict=True)
    return Intake(list(different), list(places), len(rows) - len(kept), files_skipped, cut, short)


def _check_rows(count: int) -> None:
    if count > MAX_ROWS:
        raise DataError(f"rows: {count} given, at most {MAX_ROWS} in one takedown; split them into several")


def _from_files(files: Iterable[tuple[str, bytes]], include: Sequence[str], exclude: Sequence[str]) -> Intake:
    rows: list[tuple[str, ForgetRow]] = []
    short: list[str] = []
    skipped = found = lines = 0
    for name, data in files:
        if (include and not any(fnmatch(name, glob) for glob in include)) or any(
            fnmatch(name, glob) for glob in exclude
        ):
            continue
        found += 1
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\x00"
        if "\x00" in text:
            skipped += 1  # images and the like lie in every source tree
            continue
        if name.lower().endswith(ROW_FILES):
            raise DataError(
                f"file: '{shown(name)}' in the archive is JSONL, not source code; post it by itself, or name it in 'exclude'"
            )
        lines += sum(text.count(end) for end in LINE_ENDS)
        if lines > MAX_ROWS * PIECE_LINES:
            raise DataError(
                f"file: '{shown(name)}' and the files before it have more than {MAX_ROWS * PIECE_LINES} lines; split it"
            )
        language = PurePosixPath(name).suffix.lstrip(".")
        where, made = shown(name), list(pieces(text))
        rows += [(where, forget_row({"text": piece, "language": language, "source": name}, where)) for piece in made]
        short += [where] * (not made and bool(text.strip()))
        _check_rows(len(rows))
    if not rows:
        raise DataError(
            f"file: no rows in the archive ({found} files match, {skipped} of them are not UTF-8 text); "
            "save source files as UTF-8 and pack them again, give a file of one line as a row, or check 'include'"
        )
    return checked(rows, skipped, len(rows), tuple(short))


def pieces(text: str) -> Iterator[str]:
    """Cut a source file into rows.

    At most 60 lines or 8,000 characters each, cut where an unindented line follows a blank one, if there is such a place after the
    twentieth line. A piece of one line that is not blank is left out, unless it has 200 characters or is the end of a longer one.
    """
    lines = [part for line in text.splitlines(keepends=True) for part in _parts(line)]
    start = 0
    while start < len(lines):
        end, size, most = start, 0, min(start + PIECE_LINES, len(lines))
        while end < most and (size := size + len(lines[end])) <= PIECE_CHARACTERS:
            end += 1
        if end < len(lines):
            places = range(end, start + SHORTEST_PIECE_LINES, -1)
            end = next(
                (i for i in places if not lines[i - 1].strip() and lines[i].strip() and not lines[i][0].isspace()), end
            )
        piece = "".join(lines[start:end]).strip("\r\n")
        goes_on = start > 0 and lines[start - 1][-1] not in LINE_ENDS
        if goes_on or len(piece) >= LEAST_LINE or sum(bool(line.strip()) for line in piece.splitlines()) >= 2:
            yield piece + "\n"
        start = end


def _parts(line: str) -> Iterator[str]:
    """A line in parts that a piece has room for, each cut behind a blank or a sign where there is one."""
    start = 0
    while len(line) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        at = max(line.rfind(sign, start + PIECE_CHARACTERS // 2, end) for sign in " ;,}") + 1 or end
        yield line[start:at]
        start = at
    yield line[start:]
