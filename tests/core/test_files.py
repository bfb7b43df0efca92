"""Files that exist whole or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.disks import small_disk
from unbind_core.files import APART, locked, read_regular, remove_unfinished, require_writable, write_text, write_whole

WRITER = """
import sys, time
from pathlib import Path
from unbind_core.files import write_whole

def write(temporary):
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(600)

write_whole(Path(sys.argv[1]), write)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_being_written_stays_and_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    (tmp_path / "whole.json").write_text("{}")
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "new.json"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        remove_unfinished(tmp_path)
        assert len(names(tmp_path)) == 2
        os.kill(writer.pid, signal.SIGKILL)
    assert len(names(tmp_path)) == 2
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["whole.json"]


def test_tensors_are_written_under_the_lock(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        save_file({"x": torch.ones(3)}, temporary)
        remove_unfinished(tmp_path)

    write_whole(tmp_path / "t.safetensors", write)
    assert names(tmp_path) == ["t.safetensors"] and load_file(tmp_path / "t.safetensors")["x"].sum() == 3


def test_a_failure_leaves_what_was_there_before(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("no space left on device")

    write_whole(tmp_path / "a", lambda temporary: temporary.write_text("whole"))
    with pytest.raises(OSError, match="no space"):
        write_whole(tmp_path / "a", write)
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "whole"


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    def elsewhere(_: Path) -> None:
        (tmp_path / "missing" / "other").read_bytes()

    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_text(tmp_path / "folder", "a file")
    assert caught.value.filename == str(tmp_path / "folder") and caught.value.filename2 is None
    long = tmp_path / ("n" * 250)  # the folder beside it has a longer name
    for fails in (write_text, lambda path, _: require_writable(path)):
        with pytest.raises(OSError, match="too long") as error:
            fails(long, "a file")
        assert error.value.filename == str(long)
    with pytest.raises(FileNotFoundError) as missing:
        write_whole(tmp_path / "a", elsewhere)
    assert missing.value.filename == str(tmp_path / "missing" / "other")


def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as disk:
        path = disk.folder / "page.html"
        disk.fill([os.getpid()])
        try:
            with pytest.raises(OSError, match=disk.full) as caught:
                write_text(path, "more than there is room for" * 1000)
        finally:
            disk.free([os.getpid()])
        assert caught.value.filename == str(path) and not names(disk.folder)


def test_tensors_that_do_not_fit_the_disk_are_told_of_as_any_other_file(tmp_path: Path) -> None:
    """The library that writes them says it in words of its own."""
    with small_disk(tmp_path / "disk") as disk:
        path = disk.folder / "states.safetensors"
        disk.fill([os.getpid()])
        try:
            with pytest.raises(OSError) as error:
                write_whole(path, lambda temporary: save_file({"a": torch.zeros(2**20)}, temporary))
        finally:
            disk.free([os.getpid()])
        assert error.value.strerror == disk.full and error.value.filename == str(path)
        assert not path.exists()


def test_whether_a_file_can_be_written_is_asked_without_writing_it(tmp_path: Path) -> None:
    write_text(tmp_path / "kept", "what it says")
    for path in (tmp_path / "kept", tmp_path / "new" / "folder" / "file"):
        require_writable(path)
    assert names(tmp_path) == ["kept", "new"] and not names(tmp_path / "new" / "folder")
    assert (tmp_path / "kept").read_text() == "what it says"
    for path in (tmp_path / "new", tmp_path / "kept" / "below"):
        with pytest.raises(OSError, match=r"directory|exists") as error:
            require_writable(path)
        assert str(tmp_path) in str(error.value.filename)


def test_a_folder_that_is_not_there_has_nothing_unfinished(tmp_path: Path) -> None:
    remove_unfinished(tmp_path / "missing")
    assert not names(tmp_path)


def test_a_text_is_its_owner_s_alone_and_a_new_one_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here" / "text"
    write_text(path, "é\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() == b"\xc3\xa9\n"
    with pytest.raises(FileExistsError):
        write_text(path, "other", new=True)
    assert path.read_text(encoding="utf-8") == "é\n" and names(path.parent) == ["text"]
    path.chmod(0o644)
    write_text(path, "other")
    assert path.read_text() == "other" and stat.S_IMODE(path.stat().st_mode) == 0o600
    write_text(path.with_name("new"), "new", new=True)
    assert stat.S_IMODE(path.with_name("new").stat().st_mode) == 0o600 and names(path.parent) == ["new", "text"]


LOCKER = """
import sys, time
from pathlib import Path
from unbind_core.files import locked

with locked(Path(sys.argv[1])) as held:
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_has_one_holder_and_goes_with_it_however_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    path.write_text("what it says")
    with subprocess.Popen([sys.executable, "-c", LOCKER, path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError):
            locked(path, wait=False)
        os.kill(holder.pid, signal.SIGKILL)
    with locked(path) as held:
        assert held.read() == "what it says"
    locked(path, wait=False).close()
    with locked(tmp_path / "new.lock"):
        assert stat.S_IMODE((tmp_path / "new.lock").stat().st_mode) == 0o600


LARGE = pytest.mark.parametrize("size", [100, 2 * APART])  # of files that are read into memory of either kind


@LARGE
def test_what_was_read_stays_as_it_was_whatever_becomes_of_the_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"1" * size)
    data = read_regular(path, size)
    with path.open("r+b") as file:  # in place, as no writer here does it
        file.write(b"2" * (size // 2))
        file.truncate(size // 2)
    assert bytes(data) == b"1" * size
    assert bytes(read_regular(path, size)) == b"2" * (size // 2)


@LARGE
def test_a_file_that_grows_while_it_is_read_is_read_to_its_end_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path, opened = tmp_path / "a.bin", os.fdopen
    path.write_bytes(b"1" * size)

    def grown(*given: Any, **options: Any) -> Any:
        with path.open("ab") as file:
            file.write(b"2" * size)
        return opened(*given, **options)

    most = size * 5 // 2
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdopen", grown)
        assert bytes(read_regular(path, most)) == b"1" * size + b"2" * size
        with pytest.raises(OSError, match=f"larger than {most} bytes"):
            read_regular(path, most)

    def shrunk(*given: Any, **options: Any) -> Any:
        os.truncate(path, 7)
        return opened(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdopen", shrunk)
        assert bytes(read_regular(path, 10 * size)) == b"1" * 7
