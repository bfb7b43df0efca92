"""Damaged and hostile uploads: whatever is in one, it is read or refused by name, in bounded memory and time."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.api.admin import archives
from server.api.admin.intake import from_json, from_upload
from tests.support.live import ADMIN_KEY, Live
from unbind_core.errors import DataError, InsufficientRows

SOURCE = "".join(
    f"def function_{i}(value):\n    first = value + {i}\n    return first\n\n\n" for i in range(9)
).encode()
FIRST = SOURCE.replace(b"first", b"other")
FILES = {"src/a.py": SOURCE, "b.js": SOURCE[:200]}
DEEP = b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "continuation": "b"}'
LONG_NUMBER = b'{"prompt": "a", "continuation": "b", "x": ' + b"9" * 5000 + b"}"


def zipped(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in FILES.items():
            archive.writestr(name, data)
    return out.getvalue()


def tarred(form: int = tarfile.PAX_FORMAT, headers: dict[str, str] | None = None, name: str = "é.py") -> bytes:
    """A .tar, not yet compressed, of one file with an extended header and two more."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for given_name, data in {name: FIRST, **FILES}.items():
            member = tarfile.TarInfo(given_name)
            member.size = len(data)
            member.pax_headers = (headers or {}) if given_name == name else {}
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def damaged(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def claiming(size: int) -> bytes:
    """A .zip whose directory says that the first file has so many bytes, packed and unpacked."""
    data = bytearray(zipped(zipfile.ZIP_STORED))
    struct.pack_into("<II", data, data.index(archives.CENTRAL_ENTRY) + 20, size, size)
    return bytes(data)


def overlapping() -> bytes:
    """A .zip whose directory names the same packed bytes twice."""
    data = bytearray(zipped())
    second = data.index(archives.CENTRAL_ENTRY, data.index(archives.CENTRAL_ENTRY) + 1)
    struct.pack_into("<I", data, second + 42, 0)
    return bytes(data)


def zip_bomb() -> bytes:
    """Half a kilobyte of bzip2 that says it holds ten bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.py", b" " * (100 * 2**20))
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (DEEP, "file line 1: a number too long or values nested too deeply"),
        (LONG_NUMBER, "file line 1: a number too long or values nested too deeply"),
        (zipped(zipfile.ZIP_BZIP2), "'src/a.py' in the archive is neither stored nor deflated"),
        (zipped(zipfile.ZIP_LZMA), "'src/a.py' in the archive is neither stored nor deflated"),
        (zipped().replace(b"\x08\x00", b"\x63\x00"), "'src/a.py.*' in the archive is neither stored nor deflated"),
        (claiming(2**32 - 1), "'b.js' in the archive lies within another file"),
        (claiming(2**31), "'b.js' in the archive lies within another file"),
        (overlapping(), "'b.js' in the archive lies within another file"),
        (damaged(zipped(), 45, b"\xff" * 20), "damaged or unusual .zip"),
        (gzip.compress(tarred())[:-4], "damaged or unusual .tar.gz"),
        (
            gzip.compress(tarred(tarfile.GNU_FORMAT, name="\udcff.py")),
            r"'\\udcff.py' in the archive is not named in UTF-8",
        ),
        (
            gzip.compress(tarred(headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999999"})),
            "is a sparse file",
        ),
        (gzip.compress(tarred(headers={"GNU.sparse.map": "x", "GNU.sparse.size": "y"})), "damaged or unusual .tar.gz"),
        (
            gzip.compress(tarred(headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})),
            "damaged or unusual .tar.gz",
        ),
        (gzip.compress(tarred(headers={"size": "1" * 50})), "damaged or unusual .tar.gz"),
        (gzip.compress(tarred(headers={"comment": "1" * 4000})), "extended header at byte 512"),
        (gzip.compress(tarred(headers={"comment": "a" * 9000})), "extended header at byte 512"),
        (gzip.compress(tarred(tarfile.USTAR_FORMAT, name="a.py")[:1024]), "unexpected end of data"),
        (
            gzip.compress(tarred(tarfile.USTAR_FORMAT, name="a.py").replace(b"src/a.py", b"other.py")),
            "no end at byte 1536",
        ),
    ],
)
def test_a_damaged_upload_is_refused_with_the_reason(data: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says) as refused:
        from_upload(data, [], [])
    str(refused.value).encode()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_every_usual_form_of_tar_is_read(form: int) -> None:
    long = "a" * 90 + "/" + "b" * 60 + ".py"
    for name in (long, "é.py"):
        assert {row.source for row in from_upload(gzip.compress(tarred(form, name=name)), [], []).rows} == {
            name,
            *FILES,
        }


def test_a_small_upload_never_takes_much_memory() -> None:
    lines = io.BytesIO()
    with tarfile.open(fileobj=lines, mode="w") as archive:
        member = tarfile.TarInfo("a.py")
        member.size = 60 * 2**20
        archive.addfile(member, io.BytesIO(b"\n" * member.size))
    uploads = zip_bomb(), gzip.compress(lines.getvalue(), 1)
    del lines
    for upload in uploads:
        tracemalloc.start()
        with pytest.raises(DataError):
            from_upload(upload, [], [])
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 6 * archives.MAX_UNPACKED_BYTES


EDITS = st.lists(
    st.tuples(
        st.integers(0, 2**16),
        st.integers(0, 24),
        st.one_of(st.binary(max_size=12), st.sampled_from((b"9" * 30, b"[" * 3000))),
    ),
    max_size=6,
)
GROUND = {
    "zip": zipped(),
    "stored": zipped(zipfile.ZIP_STORED),
    "bzip2": zipped(zipfile.ZIP_BZIP2),
    "lzma": zipped(zipfile.ZIP_LZMA),
    "zip64": claiming(2**32 - 1),
    "tar": tarred(),
    "gnu": tarred(tarfile.GNU_FORMAT, name="c" * 200),
    "sparse": tarred(headers={"GNU.sparse.map": "0,512", "GNU.sparse.size": "512"}),
    "tar.gz": gzip.compress(tarred()),
    "jsonl": b"".join(
        json.dumps({"prompt": "def f", "continuation": f"é{i}", "n": [1.5]}).encode() + b"\n" for i in range(5)
    ),
}


def edited(data: bytes, edits: list[tuple[int, int, bytes]], cut: int) -> bytes:
    """``data`` with pieces replaced by others, then cut off."""
    for place, length, new in edits:
        at = place % (len(data) + 1)
        data = data[:at] + new + data[at + length :]
    return data[: max(len(data) - cut, 0)]


def only_refusals(work: Callable[[], object]) -> None:
    message = ""
    try:
        work()
    except (DataError, InsufficientRows) as refused:
        message = str(refused)
    message.encode()  # what cannot be encoded cannot be answered


@settings(max_examples=400, deadline=2000, derandomize=True, database=None)
@given(st.sampled_from(tuple(GROUND)), EDITS, st.sampled_from((0, 0, 0, 1, 20, 300)))
@example("sparse", [], 0)
def test_whatever_is_uploaded_is_read_or_refused(kind: str, edits: list[tuple[int, int, bytes]], cut: int) -> None:
    data = edited(GROUND[kind], edits, cut)
    if kind in ("tar", "gnu", "sparse"):
        data = gzip.compress(data, 1)
    only_refusals(lambda: from_upload(data, [], [] if kind == "jsonl" else ["*.none"]))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just("\ud800"), st.just("\x00")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(("prompt", "continuation", "text", "source", "\ud800")), VALUES), max_size=4
    )
)
def test_whatever_rows_are_given_they_are_taken_or_refused(rows: list[dict[str, object]]) -> None:
    only_refusals(lambda: from_json(rows))


def multipart(file: bytes, **fields: str) -> tuple[bytes, dict[str, str]]:
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    ]
    head = '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = "".join(parts).encode() + head.encode() + file + b"\r\n--b--\r\n"
    return body, {"Content-Type": "multipart/form-data; boundary=b"}


def over_http(kind: str) -> bytes:
    return gzip.compress(GROUND[kind]) if kind in ("tar", "gnu", "sparse") else GROUND[kind]


DRY = {"name": "some", "options": '{"dry_run": true, "protect": "module"}'}


@pytest.mark.parametrize("kind", ["zip", "stored", "tar", "gnu", "tar.gz", "jsonl"])
def test_whole_uploads_are_taken_over_http(server: Live, kind: str) -> None:
    body, headers = multipart(over_http(kind), **DRY)
    assert server.call("/admin/v1/takedowns", body, key=ADMIN_KEY, headers=headers).status == 200


@pytest.mark.parametrize("kind", GROUND)
def test_damaged_uploads_over_http_are_bad_requests(server: Live, kind: str) -> None:
    data = over_http(kind)
    for file in (data[: len(data) // 2], damaged(data, len(data) // 3, b"\xff" * 9)):
        body, headers = multipart(file, **DRY)
        answer = server.call("/admin/v1/takedowns", body, key=ADMIN_KEY, headers=headers)
        assert answer.status == 400 and answer.error["message"], answer.raw


def test_a_prompt_that_fits_no_request_is_named_by_its_line(server: Live) -> None:
    rows = [{"prompt": "def f", "continuation": "()"}] * 2
    long = {"prompt": "x = 1\n" * 9999, "continuation": "y = 2\n"}
    body, headers = multipart("\n".join([*map(json.dumps, rows), "", json.dumps(long)]).encode(), **DRY)
    answer = server.call("/admin/v1/takedowns", body, key=ADMIN_KEY, headers=headers)
    assert (answer.status, answer.error["code"]) == (400, "bad_rows")
    assert answer.error["message"].startswith("file line 4: its prompt has ")


@pytest.mark.parametrize("kind", ["bzip2", "lzma", "zip64", "sparse"])
def test_unusual_uploads_over_http_are_bad_requests(server: Live, kind: str) -> None:
    body, headers = multipart(over_http(kind), **DRY)
    answer = server.call("/admin/v1/takedowns", body, key=ADMIN_KEY, headers=headers)
    assert answer.status == 400 and answer.error["message"], answer.raw


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": "some", "rows": [' + DEEP + b"]}",
        b'{"name": "some", "rows": [' + LONG_NUMBER + b"]}",
        b'{"name": "some", "rows": [{"prompt": "\\ud800", "continuation": "b"}]}',
        b'{"name": "some", "rows": [{"text": "\\ud800"}, {"\\ud800": "\\ud800"}]}',
        b'{"name": "some", "rows": [{"prompt": "a", "continuation": "b"}], "\\ud800": 1}',
        b'{"name": "\\ud800", "rows": [{"prompt": "a", "continuation": "b"}]}',
        b'{"name": "some", "rows": [{"prompt": "a", "continuation": "b"}], "notice": {"claimant": "\\ud800"}}',
        b'{"name": "some", "rows": [{"prompt": "a", "continuation": "b"}], "options": {"layers": [99999999999999999999999]}}',
        b'{"name": "some", "rows": [{"prompt": "a", "continuation": "b"}], "options": {"\\ud800": 1}}',
    ],
)
def test_hostile_rows_over_http_are_bad_requests(server: Live, body: bytes) -> None:
    answer = server.call("/admin/v1/takedowns", body, key=ADMIN_KEY)
    assert answer.status == 400 and answer.error["code"], answer.raw


VALUES_OF_PARTS = ["\ud800", '{"\\ud800": 1}', "[" * 100_000, "[" * 3, '{"claimant": "\\ud800"}', ""]


def with_part(part: str, value: str, kind: str = "jsonl") -> tuple[bytes, dict[str, str]]:
    """A whole form but for one part."""
    body, headers = multipart(GROUND[kind], **DRY, **({} if part in DRY else {part: "?"}))
    head = f'name="{part}"\r\n\r\n'.encode()
    before, after = body.split(head)
    _, _, after = after.partition(b"\r\n--b")
    sent = b"\xed\xa0\x80\xff" if value == "\ud800" else value.encode()
    return before + head + sent + b"\r\n--b" + after, headers


@pytest.mark.parametrize("part", ["name", "options", "notice", "other"])
@pytest.mark.parametrize("value", VALUES_OF_PARTS)
def test_hostile_parts_of_a_form_are_bad_requests(server: Live, part: str, value: str) -> None:
    body, headers = with_part(part, value)
    answer = server.call("/admin/v1/takedowns", body, key=ADMIN_KEY, headers=headers)
    assert answer.status == 400 and answer.error["code"], answer.raw


def test_a_form_without_its_file_is_a_bad_request(server: Live) -> None:
    body, headers = multipart(b"", **DRY)
    body = body.replace(b'; filename="f"', b"")
    answer = server.call("/admin/v1/takedowns", body, key=ADMIN_KEY, headers=headers)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "file", "invalid_value")


@pytest.mark.parametrize("part", ["include", "exclude"])
@pytest.mark.parametrize("value", VALUES_OF_PARTS)
def test_patterns_of_a_form_may_be_any_text(server: Live, part: str, value: str) -> None:
    body, headers = with_part(part, value, "zip")
    answer = server.call("/admin/v1/takedowns", body, key=ADMIN_KEY, headers=headers)
    long = f"{part}: at most 100 patterns of 1000"
    told = long if len(value) > 1000 else "0 files match" if part == "include" else "nothing"
    assert answer.status == 200 or told in answer.error["message"], answer.raw


@pytest.mark.parametrize("globs", [["[" * 100_000], ["*"] * 101])
def test_patterns_that_would_take_for_ever_are_refused(globs: list[str]) -> None:
    for include, exclude in ((globs, []), ([], globs)):
        with pytest.raises(DataError, match="clude: at most 100 patterns of 1000 characters"):
            from_upload(GROUND["zip"], include, exclude)
