"""The files of an uploaded .zip or .tar.gz, read in memory; nothing is unpacked to disk. First station of ``intake.py``.

Whatever is wrong with an archive is a DataError: the libraries raise many kinds of exceptions over damaged ones, few of them
documented. What cannot be read in bounded memory and time is refused by name.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unbind_core.errors import DataError, UnbindError

MAX_FILES = 20_000
MAX_UNPACKED_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 8192  # of one extended header of a .tar
ENCRYPTED = 1  # bit of a .zip member's flags
CENTRAL_ENTRY = b"PK\x01\x02"  # what each member's entry in a .zip begins with
LOCAL_HEADER_BYTES = 30  # of a .zip member, without its name
# The library looks for numbers in a header by trying every digit as the first: quadratic in the length of a run of digits.
DIGITS = re.compile(rb"[0-9]{65}")


def zip_files(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a .zip. Raises DataError."""
    with _read_as(".zip"):
        _check_count(data.count(CENTRAL_ENTRY))  # before the library makes an object of each
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            _check_members(members)
            left = MAX_UNPACKED_BYTES
            for member in members:
                with archive.open(member) as file:
                    content = file.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise _too_large()
                yield member.filename, content


def _check_members(members: list[zipfile.ZipInfo]) -> None:
    _check_count(len(members))
    end = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        _check_name(member.filename)
        where = f"file: '{shown(member.filename)}' in the archive"
        if member.flag_bits & ENCRYPTED:
            raise DataError(f"{where} is encrypted; give it without a password")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # a few bytes of bzip2 become gigabytes before the library looks at the limit
            raise DataError(
                f"{where} is neither stored nor deflated; pack it again with the usual method, or as .tar.gz"
            )
        if member.header_offset < end:
            raise DataError(f"{where} lies within another file; pack it again")
        end = member.header_offset + LOCAL_HEADER_BYTES + member.compress_size


def tar_files(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a .tar.gz. Raises DataError."""
    with _read_as(".tar.gz"):
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            unpacked = packed.read(MAX_UNPACKED_BYTES + 1)
        if len(unpacked) > MAX_UNPACKED_BYTES:
            raise _too_large()
        if unpacked and b"\0" not in unpacked[: tarfile.BLOCKSIZE]:  # a header of a .tar is never without
            raise DataError("file: it is gzip, but not of an archive; unpack it with gunzip, and give the file in it")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:", tarinfo=_Member) as archive:
            for count, member in enumerate(archive, start=1):
                _check_count(count)
                _check_name(member.name)
                where = f"file: '{shown(member.name)}' in the archive"
                if member.issym() or member.islnk():
                    raise DataError(f"{where} is a link; pack the files themselves")
                if member.issparse():  # its length is a claim: nothing says how much of it there is
                    raise DataError(f"{where} is a sparse file; pack it again without '--sparse'")
                if member.isfile() and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read()
            rest = unpacked[archive.offset :]
            if not rest or rest.strip(b"\0"):  # the library ends in silence at a header it cannot read
                raise DataError(f"file: damaged or cut .tar.gz (no end at byte {archive.offset}); pack it again")


class _Member(tarfile.TarInfo):
    """A member whose extended header can be read in bounded time."""

    def _proc_pax(self, archive: tarfile.TarFile) -> Any:
        stream = archive.fileobj
        assert stream is not None
        at = stream.tell()
        header = stream.read(min(self.size, MAX_HEADER_BYTES))
        if self.size > MAX_HEADER_BYTES or DIGITS.search(header):
            raise DataError(
                f"file: unusual .tar.gz (extended header at byte {at}); pack it again with '--format=ustar'"
            )
        stream.seek(at)
        return super()._proc_pax(archive)  # type: ignore[misc]


@contextmanager
def _read_as(kind: str) -> Iterator[None]:
    try:
        yield
    except UnbindError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the library trips over, it is the archive
        reason = shown(str(error)) or type(error).__name__
        raise DataError(f"file: damaged or unusual {kind} ({reason}); pack it again") from None


def shown(name: str) -> str:
    """A name from an archive as a message can hold it, at most 200 characters: bytes that are no characters are escaped."""
    return name[:200].encode("utf-8", "backslashreplace").decode()


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
        raise DataError(f"file: '{shown(name)}' in the archive leads out of it; pack it with relative paths")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"file: '{shown(name)}' in the archive is not named in UTF-8; rename it and pack it again"
        ) from None
