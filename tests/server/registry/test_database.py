"""The schema's history: old databases are carried over, newer ones refused, copies restore, tables and migrations agree."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
import sqlite3
import stat
import subprocess
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from threading import Barrier
from urllib.parse import quote

import pytest
from alembic import command
from sqlalchemy import Engine, text
from sqlalchemy.engine import make_url
from typer.testing import CliRunner

from server.cli import build
from server.errors import translate
from server.registry import database, records
from server.registry.access import Access
from server.registry.objects import ObjectStore
from server.registry.records import NewModule
from server.registry.refusals import AWAY, DatabaseRefused, unusable
from server.registry.registry import Registry, open_registry
from server.registry.tables import Origin
from server.settings import Settings
from server.sources import load_settings, written_out
from tests.server.registry.test_modules import make
from tests.server.registry.test_registry import ADMIN, submit
from tests.support.disks import small_disk
from tests.support.folders import files_in
from tests.support.repository import ROOT


def at_revision(url: str, revision: str) -> None:
    """A database as an older version left it."""
    engine = database.connect(url)
    with engine.begin() as connection:
        command.upgrade(database._config(connection), revision)
    engine.dispose()


def test_tables_and_migrations_agree(registry: Registry) -> None:
    engine = registry.transactions.engine
    assert database.differences(engine) == []
    assert (database.status(engine), database.revision(engine), database.damage(engine)) == (
        "current",
        database.newest(),
        [],
    )


def test_a_database_of_the_first_version_is_carried_over(database_url: str) -> None:
    at_revision(database_url, "0001")
    engine = database.connect(database_url)
    with engine.begin() as connection:
        for statement in (
            "INSERT INTO takedowns VALUES ('td_1', 'old', 3, 'f', '{}', '{}', 1.0)",
            "INSERT INTO jobs VALUES ('job_1', 'td_1', 'old', 'succeeded', 'publish', 1.0, 'done', 1, 1, NULL, 0.0, "
            "false, NULL, 'r', '{}', '{\"outcome\": \"active\"}', NULL, 1.0, 1.0, 2.0)",
            "INSERT INTO jobs VALUES ('job_2', 'td_1', 'half', 'running', 'fit', 0.5, '', 1, 1, 'w', 0.0, "
            'false, NULL, \'r\', \'{"check": {"seconds": 1.0, "result": {}}}\', NULL, NULL, 2.0, 2.0, NULL)',
            "INSERT INTO modules VALUES ('"
            + "d" * 64
            + "', 'old', 'active', 'job_1', 'td_1', '/x/old.safetensors', 2.0)",
            "INSERT INTO audit VALUES (7, 1.0, 'admin', 'takedown.submit', 'td_1', '{\"rows\": 3}')",
            "INSERT INTO audit VALUES (9, 2.0, 'w', 'job.succeeded', 'job_1', '{}')",
        ):
            connection.execute(text(statement.replace(":", r"\:")))
    assert database.status(engine) == "behind"
    kept = database.upgrade(engine)
    assert database.differences(engine) == [] and (kept is not None) == (engine.dialect.name == "sqlite")
    registry = Registry(engine)
    (module,) = registry.modules.versions()
    assert (module["name"], module["version"], module["state"], module["file"]) == (
        "old",
        1,
        "active",
        "old.safetensors",
    )
    assert registry.jobs.get("job_1", 3.0)["outcome"] == "active"
    claim = registry.jobs.claim("w", 3.0, 10.0, 3)
    assert claim is not None and (claim.job_id, dict(claim.stages)) == ("job_2", {})
    assert [row["action"] for row in registry.audit()] == ["takedown.submit", "job.succeeded"]
    submit(registry, "new")
    assert registry.audit_problems() == []
    registry.close()


def test_an_old_sqlite_file_upgrades_itself_after_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "unbind.sqlite"
    at_revision(f"sqlite:///{path}", "0001")
    with closing(sqlite3.connect(path)) as connection:  # as the first version made it, before revisions were recorded
        connection.execute("DROP TABLE alembic_version")
        connection.commit()
    with caplog.at_level("INFO", "unbind.registry"):
        database.open_database(path, tmp_path / "backups").dispose()
    (copy,) = (tmp_path / "backups").iterdir()
    assert f"from revision 0001 to {database.newest()}, after a copy to {copy}" in caplog.text
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    old = database.connect(f"sqlite:///{copy}")
    assert database.revision(old) == "0001"
    old.dispose()
    database.open_database(path, tmp_path / "backups").dispose()  # nothing to do any more
    assert len(list((tmp_path / "backups").iterdir())) == 1


def test_a_newer_database_is_refused(database_url: str) -> None:
    engine = database.connect(database_url)
    database.upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(DatabaseRefused, match="newer than this version knows"):
        database.open_database(database_url)


def test_a_postgresql_that_is_behind_is_not_upgraded_behind_its_owner_s_back(database_url: str) -> None:
    if database_url.startswith("sqlite"):
        database.open_database(database_url).dispose()
        return
    with pytest.raises(DatabaseRefused, match="unbind db upgrade"):
        database.open_database(database_url)


def test_a_role_that_may_not_is_told_of_in_one_line_with_the_remedy(database_url: str) -> None:
    if database_url.startswith("sqlite"):  # which knows no roles
        database.open_database(database_url).dispose()
        return
    owner, role = database.connect(database_url), f"r{uuid.uuid4().hex[:12]}"
    with owner.begin() as connection:
        connection.execute(text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))  # as it is from PostgreSQL 15 on
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
    url = make_url(database_url).set(username=role).render_as_string()
    for wanted, refused in (("upgrade", "schema public"), ("check", "table alembic_version")):
        done = CliRunner().invoke(build(), ["db", wanted, "--database-url", url])
        assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.output
        (said,) = done.output.splitlines()
        assert f"permission denied for {refused}" in said and "must own the database" in said and "one role" in said
        database.upgrade(owner)
    stranger = database.connect(url)
    with pytest.raises(AWAY) as raised, stranger.begin() as connection:
        connection.execute(text("DELETE FROM api_keys"))
    told = translate(raised.value)
    assert (told.status, told.code) == (503, "registry_unreachable") and "table api_keys" in told.message
    for engine in (owner, stranger):
        engine.dispose()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "database_url"),
        ("mysql://x/y", "database_url"),
        ("sqlite://", "database_url: names no file"),
        ("sqlite:///what?.sqlite", "database_url: .* in its name; give .*%3F"),
        ("postgresql+psycopg://u@/x?host=/nowhere", "cannot be reached"),
        ("postgresql+psycopg://u@one:1,two:2/x", "its port is no number; give .*host=HOST1"),
        (
            "postgresql+psycopg://u@/x?host=127.0.0.1:1&host=127.0.0.1:2&target_session_attrs=read-write",
            "port 2 failed",
        ),
    ],
)
def test_an_address_that_leads_nowhere_is_refused_by_name(url: str, says: str) -> None:
    with pytest.raises(DatabaseRefused, match=says):
        database.open_database(url)


@pytest.mark.parametrize("name", ["what?", "who?x=1", "no #1", "50%25 of", "%"])
def test_a_registry_lies_where_its_path_says_whatever_is_in_it(tmp_path: Path, name: str) -> None:
    settings = Settings(data_dir=tmp_path / name)
    registry = open_registry(settings)
    submit(registry)
    registry.close()
    registry = open_registry(load_settings({}, written_out(settings)))  # as a child process has it
    assert [row["action"] for row in registry.audit()] == ["takedown.submit"]
    registry.close()
    url = f"sqlite:///{quote(str(tmp_path / name))}/unbind.sqlite"
    backup = CliRunner().invoke(
        build(), ["db", "backup", "--database-url", url, "--out", str(tmp_path / name / "copy")]
    )
    assert backup.exit_code == 0, backup.output
    copied = Registry(database.open_database(tmp_path / name / "copy"))
    assert len(copied.audit()) == 1
    copied.close()
    assert [left.name for left in tmp_path.iterdir()] == [name]


def test_a_copy_made_while_others_write_restores(tmp_path: Path) -> None:
    path = tmp_path / "unbind.sqlite"
    registry = Registry(database.open_database(path), tmp_path / "audit.head")
    record = make(registry)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(lambda: [submit(registry, f"m{i}", float(i)) for i in range(20)])
        copy = database.backup(registry.transactions.engine, tmp_path / "copy.sqlite")
        writing.result()
    registry.close()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.copy(copy, path)
    restored = Registry(database.open_database(path))
    assert database.damage(restored.transactions.engine) == [] and restored.audit_problems() == []
    assert json.dumps(restored.modules.get("m")) == json.dumps(record)
    restored.close()


@pytest.mark.parametrize("used", [True, False])
def test_the_documented_backup_is_whole_where_something_changes_between_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(data_dir=Path(".unbind"))
    registry, store = open_registry(settings, "model"), ObjectStore(settings.published_store)
    held = ["admin.key", "forget/f.jsonl", "jobs/job_1/0/fit.pt", "modules/quarantine/no.reason"]
    for name in held if used else held[:1]:  # before the first change there is no head, evidence, module or job
        (settings.data_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (settings.data_dir / name).write_text(name)

    def change(name: str) -> None:
        data = name.encode()
        file, digest = store.put(data), hashlib.sha256(data).hexdigest()
        new = NewModule(name, digest, "model", file, Origin.TAKEDOWN, scope="global")
        with registry.transactions.change() as session:
            records.add(session, new, "auto", ADMIN, 1.0)

    page = (ROOT / "docs/operations/data.md").read_text().split("## Backup and restore")[1]
    commands = page.split("```sh\n")[1].split("```")[0].replace("/backup", "backup").splitlines()
    restore = page.split("(`cp -a")[1].split("`)")[0].replace("/backup", "backup")
    Path("backup").mkdir()
    for number, line in enumerate(commands):
        if used:
            change(f"before {number}")
        words = shlex.split(line, comments=True)
        if words[0] == "unbind":
            assert CliRunner().invoke(build(), words[1:]).exit_code == 0
        else:
            told = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True)
            assert (told.returncode, told.stderr) == (0, ""), line
    if used:
        change("after")
    registry.close()
    settings.data_dir.rename("lost")
    subprocess.run(["cp", "-a", *shlex.split(restore)], check=True)
    assert all((settings.data_dir / name).read_text() == name for name in (held if used else held[:1]))
    assert stat.S_IMODE(settings.data_dir.stat().st_mode) == 0o700
    checked = CliRunner().invoke(build(), ["db", "check"])
    assert checked.exit_code == 0, checked.output
    restored = open_registry(settings)
    copied = {f"before {number}" for number in range(3)} if used else set()
    assert {record["name"] for record in restored.modules.versions()} == copied
    restored.close()


def test_a_copy_that_has_no_room_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = database.open_database(tmp_path / "unbind.sqlite")
    with small_disk(tmp_path / "disk") as disk:
        disk.fill([os.getpid()])
        try:
            with pytest.raises(DatabaseRefused, match=r"disk/copy.sqlite \(.*\); make room there"):
                database.backup(engine, disk.folder / "copy.sqlite")
        finally:
            disk.free([os.getpid()])
        assert files_in(disk.folder) == []
        copy = database.backup(engine, disk.folder / "copy.sqlite")
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        with pytest.raises(DatabaseRefused, match="is there already"):
            database.backup(engine, copy)
    engine.dispose()


@pytest.mark.parametrize("there", ["no folder", "an empty file", "another database"])
@pytest.mark.parametrize(
    "wanted",
    [
        "audit list",
        "audit verify",
        "audit accept-head --reason restored",
        "key list",
        "key create somebody",
        "key revoke key_1",
        "db check",
        "db backup",
        "db sweep --delete",
    ],
)
def test_what_reads_or_copies_a_registry_makes_none(tmp_path: Path, wanted: str, there: str) -> None:
    path = tmp_path / "data" / "unbind.sqlite"
    if there != "no folder":
        path.parent.mkdir()
        path.touch()
    if there == "another database":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE of_somebody_else (id INTEGER)")
    before = files_in(tmp_path)
    done = CliRunner().invoke(build(), [*wanted.split(), "--data-dir", str(path.parent)])
    assert done.exit_code == 1 and f"no registry at {path}; give the server's --data-dir" in done.output
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("wanted", "served"),  # beside a server what only reads goes on
    [("key create x", False), ("key create x", True), ("db check", False), ("serve --no-worker", False)],
)
def test_a_disk_without_room_is_told_of_in_one_line_with_the_remedy(tmp_path: Path, wanted: str, served: bool) -> None:
    with small_disk(tmp_path / "disk") as disk:
        engine = database.open_database(disk.folder / "unbind.sqlite")
        with engine.connect() if served else nullcontext():
            engine.dispose()
            disk.fill([os.getpid()])
            try:
                done = CliRunner().invoke(build(), [*wanted.split(), "--data-dir", str(disk.folder)])
            finally:
                disk.free([os.getpid()])
        assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.output
        assert "make room on its disk, and see that it can be written to" in done.output.splitlines()[-1]
        done = CliRunner().invoke(build(), ["key", "list", "--json", "--data-dir", str(disk.folder)])
        assert done.stdout == "[]\n", done.output


@pytest.mark.parametrize("page", [1, -1])  # the schema's revision, and rows that no command has to read
def test_a_damaged_registry_is_not_copied(tmp_path: Path, page: int) -> None:
    path = tmp_path / "unbind.sqlite"
    database.open_database(path).dispose()
    damaged = bytearray(path.read_bytes())
    start = page * 4096 % len(damaged)
    damaged[start : start + 4096] = b"\xa5" * 4096
    path.write_bytes(damaged)
    copied = CliRunner().invoke(build(), ["db", "backup", "--data-dir", str(tmp_path)])
    assert copied.exit_code == 1 and f"{path} is damaged (" in copied.output, copied.output
    assert list(tmp_path.rglob("backups/*")) == []


@pytest.mark.parametrize("start", [0, 4096])  # the head of the file, so that it is no database; and a page within
def test_a_damaged_file_is_refused_by_name_with_the_remedy(tmp_path: Path, start: int) -> None:
    path = tmp_path / "unbind.sqlite"
    database.open_database(path).dispose()
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xa5" * (path.stat().st_size - start))
    with pytest.raises(DatabaseRefused, match=r"unbind.sqlite is damaged \(.*put a copy in its place"):
        database.open_database(path)


def test_damage_that_is_met_while_the_file_is_open_is_an_outage(tmp_path: Path) -> None:
    path = tmp_path / "unbind.sqlite"
    registry = Registry(database.open_database(path))
    make(registry)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xa5" * (path.stat().st_size - 100))
    with pytest.raises(AWAY, match="damaged") as raised:
        registry.modules.get("m")
    refusal = translate(raised.value)
    assert (refusal.status, refusal.code) == (503, "data_lost") and "put a copy in its place" in refusal.message
    registry.close()


@pytest.mark.parametrize("below", ["", "inside"])
def test_a_file_in_place_of_the_data_folder_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DatabaseRefused, match=rf"folder {tmp_path}/file.*: a file is in its place; give a folder"):
        database.open_database(tmp_path / "file" / below / "unbind.sqlite")


def test_a_link_to_a_disk_that_is_not_there_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(tmp_path / "unmounted" / "data")
    with pytest.raises(DatabaseRefused, match=rf"folder {tmp_path}/data: a link that leads nowhere is in its place"):
        database.open_database(tmp_path / "data" / "unbind.sqlite")


def test_a_disk_that_only_takes_reads_is_no_matter_of_owners() -> None:
    refused = [str(unusable(OSError(number, os.strerror(number), "a"))) for number in (errno.EROFS, errno.EACCES)]
    assert "a: Read-only file system; mount it so that it can be written to" in refused[0] and "owner" not in refused[0]
    assert "a: Permission denied; the account that runs this must own it" in refused[1]


def test_the_database_is_its_owner_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "unbind.sqlite"
    database.open_database(path).dispose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_server_and_worker_may_open_a_new_database_at_the_same_moment(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        engines = list(pool.map(lambda _: database.open_database(tmp_path / "unbind.sqlite"), range(6)))
    registry = Registry(engines[0])
    registry.jobs.request_cancel(submit(registry), ADMIN, 1.0)
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize("before", ["none", "0001", "0003"])
def test_of_several_who_upgrade_a_database_at_once_one_does_and_none_fails(
    database_url: str, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    if before != "none":
        at_revision(database_url, before)
    engines, ready = [database.connect(database_url) for _ in range(3)], Barrier(3)
    look = database.status

    def looked(engine: Engine) -> str:
        found = look(engine)
        ready.wait()  # all have seen that it is behind
        return found

    monkeypatch.setattr(database, "status", looked)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(database.upgrade, engines))
    assert {database.revision(engine) for engine in engines} == {database.newest()}
    for engine in engines:
        engine.dispose()


def test_keys_from_before_token_rates_keep_their_rules(database_url: str) -> None:
    at_revision(database_url, "0003")
    engine = database.connect(database_url)
    with engine.begin() as connection:
        old = "INSERT INTO api_keys VALUES ('key_1', 'old', 'd', '[\"inference\"]', NULL, 6.0, 2, 1.0, NULL, NULL)"
        connection.execute(text(old))
    database.upgrade(engine)
    registry = Registry(engine)
    (key,) = Access(registry.transactions).current.keys.values()
    assert (key.name, key.per_minute, key.burst, key.tokens_per_minute) == ("old", 6.0, 2, None)
    registry.close()
