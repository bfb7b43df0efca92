"""Forget sets as people send them, bad ones above all: each gets a definite answer that names the row or file."""

from __future__ import annotations

import gzip
import io
import json
import logging
import socket
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.admin import intake
from server.api.admin.archives import MAX_FILES
from server.api.admin.bodies import TakedownFields, TakedownOptions
from server.api.admin.intake import from_json, from_upload, pieces
from server.api.admin.warned import Asked, warnings_of
from tests.support.live import ADMIN_KEY, TIMEOUT, live, until
from unbind_core.errors import DataError, UnbindError

ROWS = [{"prompt": f"def f{i}():\n", "continuation": f"    return {i}\n"} for i in range(4)]
SOURCE = "".join(f"def function_{i}(value):\n    first = value + {i}\n    return first\n\n\n" for i in range(40))


def jsonl(rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()  # type: ignore[attr-defined]


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def tarred(files: dict[str, bytes], link: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        if link:
            member = tarfile.TarInfo(link)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
    return out.getvalue()


def test_jsonl_and_archives_become_rows() -> None:
    assert len(from_upload(jsonl(ROWS), [], []).rows) == 4
    assert len(from_upload(b"\xef\xbb\xbf" + jsonl(ROWS).replace(b"\n", b"\r\n"), [], []).rows) == 4
    files = {
        "src/a.py": SOURCE.encode(),
        "src/b.js": SOURCE.encode().replace(b"def", b"function"),
        "logo.png": b"\x89PNG\x00\x01",
    }
    for archive in (zipped(files), tarred(files)):
        found = from_upload(archive, [], [])
        assert found.files_skipped == 1 and {row.source for row in found.rows} == {"src/a.py", "src/b.js"}
        assert {row.language for row in found.rows} == {"py", "js"}
        only = from_upload(archive, ["*.py"], [])
        assert {row.source for row in only.rows} == {"src/a.py"}
        assert {row.source for row in from_upload(archive, [], ["src/a*"]).rows} == {"src/b.js"}
    for archive in (zipped({**files, "rows.jsonl": jsonl(ROWS)}), zipped({**files, "._rows.jsonl": b"\x00\x05"})):
        assert {row.language for row in from_upload(archive, [], ["rows.jsonl"]).rows} == {"py", "js"}


def test_it_is_known_how_many_rows_were_cut_here() -> None:
    parts, text = {"prompt": '"text": ', "continuation": "b"}, {"text": "def run(): return 1\n"}
    for rows, cut in (([parts, text, text], 2), ([parts], 0)):
        assert (from_json(rows).cut, from_upload(jsonl(rows), [], []).cut) == (cut, cut)
    found = from_upload(zipped({"a.py": SOURCE.encode()}), [], [])
    assert found.cut == len(found.rows) > 1


def test_a_source_file_is_cut_where_a_new_block_begins() -> None:
    cut = list(pieces(SOURCE))
    assert all(piece.startswith("def function_") and len(piece.splitlines()) <= intake.PIECE_LINES for piece in cut)
    assert "".join(cut).split() == SOURCE.split()
    assert list(pieces("one line\n")) == [] and list(pieces("")) == []


def test_code_that_was_made_smaller_is_cut_within_its_lines() -> None:
    line = "var a=f(1);" * 3000
    cut = list(pieces(f"{line}\n\n{line}\n"))
    assert "".join(piece.removesuffix("\n") for piece in cut).replace("\n", "") == line * 2
    assert all(len(piece) <= intake.PIECE_CHARACTERS + 1 and piece.endswith(";\n") for piece in cut) and len(cut) > 8
    assert list(pieces("x" * 16_004)) == ["x" * 8000 + "\n", "x" * 8000 + "\n", "xxxx\n"]


def test_files_of_one_short_line_are_named() -> None:
    files = {
        "a.py": SOURCE.encode(),
        "b/__init__.py": b"from a import f\n",
        "empty.py": b"\n",
        "min.js": b"f(1);" * 100,
    }
    found = from_upload(zipped(files), [], [])
    assert found.short == ("b/__init__.py",) and found.places[-1] == "min.js"
    many = from_upload(zipped({**files, **{f"{i}.py": b"import os\n" for i in range(6)}}), [], [])
    asked = TakedownFields(name="m", options=TakedownOptions(scope="global"))
    for intake_of, named in ((found, "b/__init__.py;"), (many, ", 3.py and 2 more;")):
        (told,) = warnings_of(Asked(asked, {}, intake_of), {"too_short": 0})
        assert told.startswith("file: a file of one short line makes no row: b/__init__.py") and named in told


def test_what_chooses_files_of_an_archive_is_refused_beside_rows() -> None:
    for option, include, exclude in (("include", ["*.py"], []), ("exclude", [], ["*.py"])):
        with pytest.raises(DataError, match=f"{option}: chooses files of an archive, and this is JSONL"):
            from_upload(jsonl(ROWS), include, exclude)
    assert from_upload(jsonl(ROWS), [""], [""]) == from_upload(jsonl(ROWS), [], [])  # what a form left empty


@given(st.text(max_size=3000))
def test_no_text_is_lost_by_cutting(text: str) -> None:
    lines = text.splitlines()
    kept = [line for piece in pieces(text) for line in piece.splitlines() if line.strip()]
    assert set(kept) <= {line for line in lines if line.strip()} and len(kept) <= len(lines)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b"  \n\n", "it is empty"),
        (jsonl(ROWS)[:-20], "file line 4: not JSON"),
        (SOURCE.encode(), r"file line 1: not JSON .*one file alone \(tar czf rows.tar.gz FILE\), and cut into rows"),
        (b"\n\xef\xbb\xbfimport os\n", "file line 2: not JSON .*Source code is given as .zip or .tar.gz"),
        (b"\x7fELF\x00\x00", "binary, but neither"),
        (jsonl(ROWS).decode().encode("utf-16"), "binary, but neither"),
        ('{"text": "über"}'.encode("latin-1"), r"not UTF-8 \(byte 10\)"),
        (jsonl([*ROWS, {"text": "a\n\u0000b\n" * 9}]), "file line 5: holds a NUL"),
        (
            jsonl([*ROWS, {"prompt": "x", "continuation": "\ud800"}]),
            "line 5: field 'continuation' holds half of a surrogate",
        ),
        (jsonl([*ROWS, {"prompt": "x", "continuation": "y" * 300_000}]), "file line 5: longer than 200000"),
        (jsonl(ROWS[:1] * 2) + b"\n\n" + jsonl([{"text": "a\n\u0000b\n" * 9}]), "file line 5: holds a NUL"),
        (jsonl([*ROWS, ["list"]]), "file line 5: a JSON object"),
        (jsonl([*ROWS, {"prompt": "x"}]), "field 'continuation' is missing"),
        (zipped({"../../etc/cron.d/x": SOURCE.encode()}), "'../../etc/cron.d/x' in the archive leads out of it"),
        (zipped({"/etc/passwd": SOURCE.encode()}), "leads out of it"),
        (zipped({"a\\..\\..\\b.py": SOURCE.encode()}), "leads out of it"),
        (zipped({"C:/b.py": SOURCE.encode()}), "leads out of it"),
        (tarred({"../x.py": SOURCE.encode()}), "leads out of it"),
        (tarred({"x.py": SOURCE.encode()}, link="y.py"), "'y.py' in the archive is a link"),
        (
            zipped({"a.png": b"\x00\x01"}),
            "no rows in the archive .1 files match, 1 of them are not UTF-8 text.; save source files as UTF-8",
        ),
        (zipped({}), "binary, but neither|no rows"),
        (zipped({"a.py": SOURCE.encode(), "in/rows.jsonl": jsonl(ROWS)}), "'in/rows.jsonl' in the archive is JSONL"),
        (
            tarred({"ROWS.NDJSON": jsonl(ROWS)}),
            "'ROWS.NDJSON' in the archive is JSONL, not source code; post it by itself",
        ),
        (zipped({"a.py": SOURCE.encode()})[:-30], "damaged or unusual .zip"),
        (tarred({"a.py": SOURCE.encode()})[:-30], "damaged or unusual .tar.gz"),
        (gzip.compress(b"not \0 a tar"), "damaged or unusual .tar.gz"),
        (gzip.compress(b""), "damaged or unusual .tar.gz"),
        (gzip.compress(jsonl(ROWS)), "it is gzip, but not of an archive; unpack it with gunzip"),
        (gzip.compress(SOURCE.encode()), "it is gzip, but not of an archive; unpack it with gunzip"),
    ],
)
def test_a_bad_upload_is_refused_with_the_reason(data: bytes, says: str) -> None:
    with pytest.raises(UnbindError, match=says):
        from_upload(data, [], [])


def test_bombs_are_refused_before_they_go_off() -> None:
    zeros = b" " * (200 * 2**20)
    for bomb in (zipped({"a.py": zeros}), tarred({"a.py": zeros}), tarred({"skipped.bin": zeros, "b.py": b"x"})):
        assert len(bomb) < 2**20
        with pytest.raises(UnbindError, match="unpacks to more than"):
            from_upload(bomb, ["*.py"], [])
    with pytest.raises(UnbindError, match=f"more than {MAX_FILES} files"):
        from_upload(zipped({f"{i}.py": b"x" for i in range(MAX_FILES + 1)}), [], [])


def test_a_row_keeps_its_place_behind_duplicates_and_blank_lines() -> None:
    sent = from_upload(jsonl(ROWS[:1] * 2) + b"\n \n" + jsonl(ROWS[1:2]), [], [])
    assert (sent.places, sent.duplicates_dropped) == (["file line 1", "file line 5"], 1)
    assert from_json([*ROWS[:1] * 2, ROWS[1]]).places == ["rows.0", "rows.2"]
    assert from_upload(zipped({"a.py": SOURCE.encode()}), [], []).places == ["a.py"] * len(list(pieces(SOURCE)))


def test_rows_of_a_json_body_are_named_by_their_place() -> None:
    assert from_json([*ROWS, ROWS[0]]).duplicates_dropped == 1
    assert len(from_upload(jsonl(ROWS[:1] * 9), [], []).rows) == 1
    with pytest.raises(UnbindError, match=r"rows\.4: field 'text'"):
        from_json([*ROWS, {"text": 5}])


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=b"])
def test_an_upload_that_breaks_off_is_no_error_of_the_server(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with live(checkpoint, tmp_path) as server, caplog.at_level(logging.INFO):
        head = (
            f"POST /admin/v1/takedowns HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ADMIN_KEY}\r\n"
            f"Content-Type: {kind}\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as client:
            client.sendall(head.encode())
            assert client.recv(100).startswith(b"HTTP/1.1 100")  # it waits for the body
            client.sendall(b"--b\r\n")
        until(lambda: "POST /admin/v1/takedowns 4" in caplog.text or "POST /admin/v1/takedowns 5" in caplog.text)
        assert "POST /admin/v1/takedowns 499" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
