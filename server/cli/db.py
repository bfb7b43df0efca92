"""``unbind db``: the registry's database, brought to this version, backed up, looked over, and its store swept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import typer
from sqlalchemy import Engine

from server.cli.audit import AS_JSON, OPERATOR
from server.cli.console import clear_errors, screen, show_lines, write_json
from server.cli.flags import flag, with_settings
from server.registry import database
from server.registry.objects import DamagedObject, ObjectStore
from server.registry.refusals import NotAllowed
from server.registry.registry import Registry
from server.registry.retention import spare_files, sweep_files
from server.registry.tables import ModuleState, Origin
from server.registry.trail import unguarded
from server.settings import Settings
from unbind_core import UnbindError

_OUT = flag("out", Path | None, typer.Option(None, "--out", help="file to write; in data_dir/backups where not given"))
_DELETE = flag("delete", bool, typer.Option(False, "--delete", help="delete them; else they are only listed"))


@with_settings([AS_JSON])
def upgrade(settings: Settings, as_json: bool) -> None:
    """Bring the database to this version's schema; an SQLite file is copied to data_dir/backups first."""
    with clear_errors(), _open(settings, existing=False) as engine:
        before = database.revision(engine)
        kept = database.upgrade(engine, settings.data_dir / "backups") if before != database.newest() else None
        after = database.revision(engine)
    if as_json:
        write_json({"before": before, "after": after, "backup": str(kept) if kept else None})
    else:
        screen.print(f"revision {before} -> {after}" if before != after else f"revision {after}: nothing to do")
        if kept:
            screen.print(f"backup: {kept}", soft_wrap=True, highlight=False)


@with_settings([_OUT, AS_JSON])
def backup(settings: Settings, out: Path | None, as_json: bool) -> None:
    """Copy an SQLite database, consistent while servers run."""
    target = out or settings.data_dir / "backups" / f"unbind-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.sqlite"
    with clear_errors(), _open(settings) as engine:
        database.backup(engine, target)
    if as_json:
        write_json({"backup": str(target)})
    else:
        screen.print(f"written to {target}", soft_wrap=True, highlight=False)


@with_settings([AS_JSON])
def check(settings: Settings, as_json: bool) -> None:
    """Is the schema this version's, are the database's and the store's files sound, is the audit trail whole and guarded? Ends with
    code 1 where not.
    """
    with clear_errors(), _open(settings) as engine:
        problems = [] if database.status(engine) == "current" else ["the schema is behind: run `unbind db upgrade`"]
        if not problems:
            problems += [f"schema: {difference}" for difference in database.differences(engine)]
            problems += [f"file: {line}" for line in database.damage(engine)]
            problems += [f"guard: {line}" for line in unguarded(engine)]
            registry = Registry(engine, settings.audit_head_file)
            problems += [f"audit: {line}" for line in registry.audit_problems()]
            problems += [f"store: {line}" for line in _unreadable(registry, ObjectStore(settings.published_store))]
        found = database.revision(engine)
    if as_json:
        write_json({"revision": found, "sound": not problems, "problems": problems})
    else:
        for problem in problems or ["sound"]:
            screen.print(f"revision {found}: {problem}", soft_wrap=True, highlight=False)
    if problems:
        raise typer.Exit(1)


def _unreadable(registry: Registry, store: ObjectStore) -> Iterator[str]:
    """The modules and guards that are in use, or may be again, whose files the store does not give."""
    for record in registry.modules.versions():
        if record["state"] == ModuleState.RETIRED or record["origin"] == Origin.SHIPPED:
            continue
        try:
            store.get(record["file"], record["digest"])
        except (OSError, DamagedObject) as error:
            said = getattr(error, "strerror", None) or error
            yield f"{record['kind']} '{record['name']}' ({record['id']}, {record['state']}), {record['file']}: {said}"


@with_settings([_DELETE, AS_JSON])
def sweep(settings: Settings, delete: bool, as_json: bool) -> None:
    """List, or delete, the files of the module store that nothing needs: those of versions retired over a day ago, and those over a
    day old that no record names.
    """
    store = ObjectStore(settings.published_store)
    with clear_errors(), _open(settings) as engine:
        if database.status(engine) != "current":
            raise UnbindError("the schema is behind: run `unbind db upgrade`")
        registry = Registry(engine, settings.audit_head_file)
        try:
            found = spare_files(registry, store)
        except NotAllowed as error:
            raise UnbindError(str(error)) from None
        if delete:
            found = sweep_files(registry, store, found, OPERATOR)
    total = sum(file.bytes for file in found)
    if as_json:
        write_json({"deleted": delete, "bytes": total, "files": [asdict(file) for file in found]})
        return
    if found:
        lines = ([file.file, str(file.bytes), " ".join(file.records) or "no record"] for file in found)
        show_lines(("file", "bytes", "retired"), lines)
    what = "deleted" if delete else "can go; --delete deletes them"
    screen.print(f"files: {len(found)}, bytes: {total:,}; {what}" if found else "nothing can go", highlight=False)


@contextmanager
def _open(settings: Settings, *, existing: bool = True) -> Iterator[Engine]:
    """The engine of the settings' database, given back at the end."""
    engine = database.connect(settings.database_address, existing=existing)
    try:
        if existing:
            database.require_registry(engine)
        yield engine
    finally:
        engine.dispose()


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="The registry's database: upgrade, backup, check, sweep.", no_args_is_help=True)
    group.command("upgrade")(upgrade)
    group.command("backup")(backup)
    group.command("check")(check)
    group.command("sweep")(sweep)
    app.add_typer(group, name="db")
