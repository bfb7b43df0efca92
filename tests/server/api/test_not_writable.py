"""A server whose own files cannot be written goes on, and says so to who changes something and to who asks if it is ready."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from server.errors import translate
from server.registry import database


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
def test_a_file_that_the_system_refuses_is_told_of_with_the_remedy_and_without_its_path(number: int) -> None:
    refusal = translate(OSError(number, os.strerror(number), "/data/forget/secret"))
    assert (refusal.status, refusal.code) == (503, "not_writable") and refusal.headers
    assert (
        os.strerror(number) in refusal.message and "data folder" in refusal.message and "secret" not in refusal.message
    )


def test_a_database_that_can_only_be_read_is_not_said_to_be_silent(tmp_path: Path) -> None:
    engine = database.open_database(tmp_path / "unbind.sqlite")
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only=1")
        with pytest.raises(OperationalError) as raised:
            connection.exec_driver_sql("DELETE FROM jobs")
    engine.dispose()
    refusal = translate(raised.value)
    assert (refusal.status, refusal.code) == (503, "not_writable") and "readonly database" in refusal.message
