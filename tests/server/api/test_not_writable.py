"""A server whose own files cannot be written goes on, and says so to who changes something and to who asks if it is ready."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from server.errors import translate
from server.registry import database
from tests.server.api.test_away import reasons
from tests.support.disks import small_disk
from tests.support.folders import files_in
from tests.support.live import live, until

POSTED = {
    "name": "held",
    "rows": [{"text": "def area(width, height):\n    return width * height\n" * 20}],
    "options": {"protect": "guard", "scope": "global"},
}


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
def test_a_file_that_the_system_refuses_is_told_of_with_the_remedy_and_without_its_path(number: int) -> None:
    refusal = translate(OSError(number, os.strerror(number), "/data/forget/secret"))
    assert (refusal.status, refusal.code) == (503, "not_writable") and refusal.headers
    assert (
        os.strerror(number) in refusal.message and "data folder" in refusal.message and "secret" not in refusal.message
    )


@pytest.mark.parametrize("setting", ["module_store", "private_store"])
@pytest.mark.parametrize("link", [False, True])
def test_what_is_in_a_store_s_place_is_told_of_and_named_in_the_log(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: str, link: bool
) -> None:
    """A file, or a link to a disk that is not mounted, where takedowns put their rows or guards."""
    store = tmp_path / "store"
    place = store / ("objects" if setting == "module_store" else "forget")
    with live(checkpoint, tmp_path, **{setting: str(store)}) as server:
        store.mkdir(exist_ok=True)
        place.symlink_to(tmp_path / "unmounted") if link else place.touch()
        before = files_in(store)
        refused = server.admin("/takedowns", POSTED)
        assert (refused.status, refused.error["code"]) == (503, "not_writable")
        assert "what its log names" in refused.error["message"] and str(place) in caplog.text
        assert server.admin("/takedowns").body["data"] == []
        assert files_in(store) == before and files_in(tmp_path / "data" / "forget") == []
        place.unlink()
        assert server.admin("/takedowns", POSTED).status == 202


def test_a_store_without_room_is_named_in_the_log(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        small_disk(tmp_path / "disk") as disk,
        live(checkpoint, tmp_path, private_store=str(disk.folder / "private")) as server,
    ):
        disk.fill([os.getpid()])
        try:
            refused = server.admin("/takedowns", POSTED)
        finally:
            disk.free([os.getpid()])
        assert (refused.status, refused.error["code"]) == (507, "disk_full")
        assert "where its log says" in refused.error["message"] and str(disk.folder / "private") in caplog.text


def test_a_database_that_can_only_be_read_is_not_said_to_be_silent(tmp_path: Path) -> None:
    engine = database.open_database(tmp_path / "unbind.sqlite")
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only=1")
        with pytest.raises(OperationalError) as raised:
            connection.exec_driver_sql("DELETE FROM jobs")
    engine.dispose()
    refusal = translate(raised.value)
    assert (refusal.status, refusal.code) == (503, "not_writable") and "readonly database" in refusal.message


def test_a_server_that_cannot_write_is_degraded_until_it_can(checkpoint: Path, tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk") as disk,
        live(checkpoint, tmp_path, data_dir=disk.folder / "data", refresh_seconds=0.01) as server,
    ):
        until(lambda: reasons(server) == [])
        kept = files_in(disk.folder / "data")
        disk.fill([os.getpid()])
        try:
            until(lambda: reasons(server) != [])
            (reason,) = reasons(server)
            answered = server.complete().status
        finally:
            disk.free([os.getpid()])
        assert reason.startswith("writing to the data folder: ") and disk.full in reason and answered == 200
        until(lambda: reasons(server) == [])
        assert files_in(disk.folder / "data") == kept  # and nothing of what was tried is left
