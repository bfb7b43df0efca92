"""The database behind the registry: opened, brought to this version's schema, backed up. SQLite or PostgreSQL by URL.

SQLite upgrades itself when it is opened, after a backup; PostgreSQL is upgraded by ``unbind db upgrade``. A database of a newer
version is refused by both.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError

from server.registry import refusals
from server.registry.audit import one_at_a_time
from server.registry.refusals import ADDRESSES, DatabaseDamaged, DatabaseGone, DatabaseRefused
from server.registry.tables import Base
from unbind_core.files import Anchor, locked, write_whole

log = logging.getLogger("unbind.registry")
logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells of every look at the database

LOCK_SECONDS = 10
# A machine that is gone without a word is noticed in so long, not by the kernel's two hours; milliseconds in the last.
_NOTICED = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 1000 * LOCK_SECONDS,
}
_FIRST = "0001"  # the schema of databases from before revisions were recorded


def connect(url: str | Path, *, existing: bool = False) -> Engine:
    """An engine for the address, or for the path of an SQLite file, which is made unless it must be an ``existing`` one.

    Raises DatabaseRefused naming what is wrong with it.
    """
    try:
        if isinstance(url, Path):
            return _sqlite(url, existing)
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            named = url.partition(":///")[2]
            if not named or "?" in named:  # what follows it would be left out, and another file be taken
                raise DatabaseRefused(f"database_url: names no file, or has a ? in its name; {ADDRESSES}")
            return _sqlite(Path(unquote(named)), existing)
        if parsed.get_backend_name() == "postgresql":
            return _postgresql(parsed)
    except OSError as error:
        raise refusals.unusable(error) from None
    except (ArgumentError, NoSuchModuleError) as error:
        raise DatabaseRefused(f"database_url: {error}; {ADDRESSES}") from None
    except ValueError:  # not in its own words, which have a part of a password that was written with a / in it
        raise DatabaseRefused(f"database_url: its port is no number; {ADDRESSES}") from None
    raise DatabaseRefused(f"database_url: '{parsed.get_backend_name()}' is not supported; {ADDRESSES}")


def open_database(url: str | Path, backups: Path | None = None, *, existing: bool = False) -> Engine:
    """An engine on a database of this version's schema. ``url`` may be the path of an SQLite file.

    An SQLite file is made, unless it must be an ``existing`` one, or upgraded, after a copy to ``backups`` or beside it, and looked
    through. Raises DatabaseRefused.
    """
    engine = connect(url, existing=existing)
    try:
        if existing and status(engine) != "current":
            require_registry(engine)
        if engine.dialect.name == "sqlite":
            # Server and worker may open a new database at the same moment: one makes it, the other waits.
            file = Path(engine.url.database or "")
            with locked(file.with_name(f"{file.name}.lock")):
                if status(engine) != "current":
                    upgrade(engine, backups)
                _require_sound(engine)
        elif status(engine) != "current":
            raise DatabaseRefused(f"the database is at revision {revision(engine)}: run `unbind db upgrade` first")
    except BaseException:
        engine.dispose()
        raise
    return engine


def revision(of: Engine | Connection) -> str:
    """The recorded revision, "none" for an empty database."""
    with nullcontext(of) if isinstance(of, Connection) else of.connect() as connection:
        recorded = MigrationContext.configure(connection).get_current_revision()
        if recorded is None and inspect(connection).has_table("jobs"):
            return _FIRST
    return recorded or "none"


def newest() -> str:
    """The revision of this version's schema."""
    return str(_scripts().get_current_head())


def status(engine: Engine) -> str:
    """ "current", or "behind" where an upgrade is needed. Raises DatabaseRefused for a newer or an unreachable one."""
    try:
        at = revision(engine)
    except OperationalError as error:
        raise refusals.unanswered(error) from None
    known = {script.revision for script in _scripts().walk_revisions()} | {"none"}
    if at not in known:
        raise DatabaseRefused(
            f"the database has revision {at}, which is newer than this version knows ({newest()}): upgrade this software, "
            "or restore the backup that was made before the database was upgraded"
        )
    return "current" if at == newest() else "behind"


def require_registry(engine: Engine) -> None:
    """Raises DatabaseRefused where an SQLite file holds none; PostgreSQL has one as soon as it is upgraded."""
    if engine.dialect.name == "sqlite" and revision(engine) == "none":
        raise refusals.no_registry(Path(engine.url.database or ""))


def upgrade(engine: Engine, backups: Path | None = None) -> Path | None:
    """Bring the schema to this version's, all in one transaction; returns the backup that was made of an SQLite file."""
    at = revision(engine)
    status(engine)
    kept = None
    if at != "none" and engine.dialect.name == "sqlite":
        file = Path(engine.url.database or "")
        kept = backup(engine, (backups or file.parent) / f"{file.stem}-before-{newest()}-{time.time_ns()}.sqlite")
    with engine.begin() as connection:
        one_at_a_time(connection)  # another may have done it, as where several machines begin with an upgrade
        config = _config(connection)
        if revision(connection) == _FIRST:
            command.stamp(config, _FIRST)
        command.upgrade(config, "head")
    if kept is not None:
        log.info("the registry was upgraded from revision %s to %s, after a copy to %s", at, newest(), kept)
    return kept


def backup(engine: Engine, target: Path) -> Path:
    """A consistent copy of an SQLite file while others use it, whole and sound or not at all.

    Raises DatabaseRefused, also for PostgreSQL and where the file is damaged: the copy would pass for one to restore.
    """
    if engine.dialect.name != "sqlite":
        raise DatabaseRefused("this database is PostgreSQL: back it up with pg_dump")
    if target.exists():
        raise DatabaseRefused(f"{target} is there already; choose another name for the copy")

    file = Path(engine.url.database or "")

    def write(temporary: Path) -> None:
        with closing(_open_file(file, timeout=LOCK_SECONDS)) as source, closing(sqlite3.connect(temporary)) as copy:
            source.backup(copy)
            # The copy has the damage of what it was made of, and nobody waits while it is looked through.
            found = str(copy.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))

    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(target, write)
    except (sqlite3.Error, OSError) as error:
        if type(error) is sqlite3.DatabaseError:  # as below
            raise DatabaseRefused(f"nothing was copied: {DatabaseDamaged(file, error)}") from None
        raise DatabaseRefused(
            f"the database cannot be copied to {target} ({error}); make room there, or choose another place"
        ) from None
    return target


def differences(engine: Engine) -> list[Any]:
    """Where the tables of the database differ from those that the code declares; empty where all is well."""
    with engine.connect() as connection:
        return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))


def damage(engine: Engine) -> list[str]:
    """What the database itself says of its files; empty where all is well."""
    if engine.dialect.name != "sqlite":
        return []
    with engine.connect() as connection:
        found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check")]
        found += [f"foreign key: {tuple(row)}" for row in connection.exec_driver_sql("PRAGMA foreign_key_check")]
    return [line for line in found if line != "ok"]


def _require_sound(engine: Engine) -> None:
    """See that an SQLite file holds together before anything rests on it. Raises DatabaseRefused."""
    try:
        with engine.connect() as connection:
            found = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar())
        if found != "ok":
            raise DatabaseDamaged(Path(engine.url.database or ""), " ".join(found.split()))
    except DatabaseDamaged as error:
        raise DatabaseRefused(str(error)) from None


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    if connection is not None:
        config.attributes["connection"] = connection
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def _postgresql(address: URL) -> Engine:
    """The database at this address. A change waits LOCK_SECONDS for another's, which may stand still for as long."""
    engine = create_engine(
        address,
        pool_pre_ping=True,
        pool_size=10,
        # Nothing is prepared: behind a pooler the next transaction may go to another server, which knows other names of statements.
        connect_args={"connect_timeout": LOCK_SECONDS, "prepare_threshold": None, **_NOTICED},
        isolation_level="READ COMMITTED",
    )
    event.listen(engine, "handle_error", refusals.tell_apart)

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # A machine that is paused or gone would hold the writer's lock for as long as the server believes in its connection.
        # Said in the transaction and not at the connection's start, where a pooler would not let it through.
        if not connection.get_execution_options().get("reading", False):
            connection.exec_driver_sql(
                f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'; "
                f"SET LOCAL idle_in_transaction_session_timeout = '{LOCK_SECONDS}s'"
            )

    return engine


def _open_file(file: Path, **options: Any) -> sqlite3.Connection:
    # for reading and writing what is there: else SQLite makes an empty file where one was taken away at this very moment
    opened: sqlite3.Connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True, **options)
    return opened


def _sqlite(file: Path, existing: bool) -> Engine:
    """The database file, for its owner alone, made where it is missing and need not exist; write-ahead log, 10 s lock wait.

    From then on it must stay that file: DatabaseGone is raised once it was removed or replaced, DatabaseDamaged where it is.
    """
    if existing:
        if not file.is_file() or not file.stat().st_size:
            raise refusals.no_registry(file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    file.chmod(0o600)
    engine = create_engine(URL.create("sqlite", database=str(file)), connect_args={"timeout": LOCK_SECONDS})
    anchor = Anchor(file, "the registry's database file")

    def check() -> None:
        if (lost := anchor.lost) is not None:
            raise DatabaseGone(lost)

    @event.listens_for(engine, "handle_error")
    def _translate(context: ExceptionContext) -> None:
        # SQLite's word for a file that it cannot make sense of; whatever else goes wrong is of a class derived from this.
        if type(context.original_exception) is sqlite3.DatabaseError:
            raise DatabaseDamaged(file, context.original_exception) from None

    @event.listens_for(engine, "do_connect")
    def _open(_dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]) -> Any:
        check()
        return _open_file(file, **options)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _: Any) -> None:
        # transactions are begun below, not by the driver
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        check()
        # A writer takes the lock before it reads, so that what it decided on still holds when it writes.
        reading = connection.get_execution_options().get("reading", False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    return engine
