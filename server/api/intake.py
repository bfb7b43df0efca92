"""A posted forget set -> rows: JSON rows, JSONL, or an archive of source files. Nothing is unpacked to disk.

Limits are checked while reading, so that a small upload cannot become a large one. Every refusal is a DataError that names the
row or file. How files become rows: see ``pieces``.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

from unbind_core.errors import DataError, InsufficientRows
from unbind_core.rows import ForgetRow, forget_row, parse_forget

MAX_ROWS = 100_000
MAX_ROW_CHARACTERS = 200_000
MAX_FILES = 20_000
MAX_UNPACKED_BYTES = 64 * 2**20
PIECE_LINES = 60
SHORTEST_PIECE_LINES = 20


@dataclass(frozen=True)
class Intake:
    """A forget set that can be used, and what was left out of it."""

    rows: list[ForgetRow]
    duplicates_dropped: int
    files_skipped: int = 0


def from_json(rows: Sequence[dict[str, Any]]) -> Intake:
    """Rows of a JSON body."""
    return _checked([(f"rows.{index}", forget_row(row, f"rows.{index}")) for index, row in enumerate(rows)])


def from_upload(data: bytes, include: Sequence[str], exclude: Sequence[str]) -> Intake:
    """Rows of an uploaded file: .zip, .tar.gz or JSONL, told apart by content."""
    if data[:4] == b"PK\x03\x04":
        return _from_files(_zip(data), include, exclude)
    if data[:2] == b"\x1f\x8b":
        return _from_files(_tar(data), include, exclude)
    if not data.strip():
        raise DataError("file: it is empty; give JSONL, .zip or .tar.gz")
    if b"\x00" in data:
        raise DataError("file: binary, but neither .zip nor .tar.gz; give JSONL or one of these")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"file: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    rows = parse_forget(text.split("\n"), "file")
    return _checked([(f"file row {number}", row) for number, row in enumerate(rows, start=1)])


def _checked(rows: Sequence[tuple[str, ForgetRow]], files_skipped: int = 0) -> Intake:
    if len(rows) > MAX_ROWS:
        raise DataError(f"rows: {len(rows)} given, at most {MAX_ROWS} in one takedown; split them into several")
    kept: dict[tuple[str, str], ForgetRow] = {}
    for where, row in rows:
        if len(row.prompt) + len(row.continuation) > MAX_ROW_CHARACTERS:
            raise DataError(f"{where}: longer than {MAX_ROW_CHARACTERS} characters; split it into several rows")
        if "\x00" in row.prompt or "\x00" in row.continuation:
            raise DataError(f"{where}: holds a NUL character, so it is not text; leave it out")
        try:
            f"{row.prompt}{row.continuation}{row.source}{row.language}".encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{where}: holds half of a surrogate pair, which is no character; mend its encoding"
            ) from None
        kept.setdefault((row.prompt, row.continuation), row)
    if not kept:
        raise InsufficientRows("rows: none given; at least one is needed")
    return Intake(list(kept.values()), len(rows) - len(kept), files_skipped)


def _from_files(files: Iterable[tuple[str, bytes]], include: Sequence[str], exclude: Sequence[str]) -> Intake:
    rows: list[tuple[str, ForgetRow]] = []
    skipped = found = 0
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
        language = PurePosixPath(name).suffix.lstrip(".")
        rows += [
            (name, forget_row({"text": piece, "language": language, "source": name}, name)) for piece in pieces(text)
        ]
    if not rows:
        raise DataError(
            f"file: no rows in the archive ({found} files match, {skipped} of them are not UTF-8 text); check 'include'"
        )
    return _checked(rows, skipped)


def pieces(text: str) -> Iterator[str]:
    """Cut a source file into rows.

    At most 60 lines each, cut where an unindented line follows a blank one, if there is such a place after the twentieth line.
    Pieces of fewer than two lines that are not blank are left out.
    """
    lines = text.splitlines(keepends=True)
    start = 0
    while start < len(lines):
        end = min(start + PIECE_LINES, len(lines))
        if end < len(lines):
            places = range(end, start + SHORTEST_PIECE_LINES, -1)
            end = next(
                (i for i in places if not lines[i - 1].strip() and lines[i].strip() and not lines[i][0].isspace()), end
            )
        piece = "".join(lines[start:end]).strip("\r\n")
        if sum(bool(line.strip()) for line in piece.splitlines()) >= 2:
            yield piece + "\n"
        start = end


# Archives.


def _zip(data: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            _check_count(len(members))
            left = MAX_UNPACKED_BYTES
            for member in members:
                _check_name(member.filename)
                if member.flag_bits & 1:
                    raise DataError(
                        f"file: '{member.filename[:200]}' in the archive is encrypted; give it without a password"
                    )
                with archive.open(member) as file:
                    content = file.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise _too_large()
                yield member.filename, content
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
        raise DataError(f"file: damaged or unusual .zip ({error}); pack it again") from None


def _tar(data: bytes) -> Iterator[tuple[str, bytes]]:
    count = 0
    try:
        unpacked = _Limited(gzip.GzipFile(fileobj=io.BytesIO(data)))
        with tarfile.open(fileobj=unpacked, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                count += 1
                _check_count(count)
                _check_name(member.name)
                if member.issym() or member.islnk():
                    raise DataError(f"file: '{member.name[:200]}' in the archive is a link; pack the files themselves")
                if member.isfile() and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read()
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"file: damaged or unusual .tar.gz ({error}); pack it again") from None


class _Limited:
    """What a stream reads, up to the limit on unpacked bytes."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream, self._left = stream, MAX_UNPACKED_BYTES

    def read(self, size: int) -> bytes:
        """The next bytes."""
        found = self._stream.read(size)
        self._left -= len(found)
        if self._left < 0:
            raise _too_large()
        return found


def _too_large() -> DataError:
    return DataError(
        f"file: the archive unpacks to more than {MAX_UNPACKED_BYTES} bytes; split it into several takedowns"
    )


def _check_count(count: int) -> None:
    if count > MAX_FILES:
        raise DataError(f"file: more than {MAX_FILES} files in the archive; split it into several takedowns")


def _check_name(name: str) -> None:
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\x00" in name:
        raise DataError(f"file: '{name[:200]}' in the archive leads out of it; pack it with relative paths")
