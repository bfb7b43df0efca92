"""Is the audit trail whole, and guarded? The head kept outside the database, the check of the whole chain, what was found so far.

``transactions.py`` has the head follow each change. It moves on only where the trail still holds the entry it names, so that
what was once deleted or written anew is reported until somebody accepts it. The server checks the whole chain by the clock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from server.registry import audit
from unbind_core.files import locked

log = logging.getLogger("unbind.audit")
PAGE = 100  # entries read in one transaction, and for some milliseconds without a break
PAUSE_SECONDS = 0.002  # after each of them where requests are answered meanwhile
REMEMBERED = 100  # problems that are held in memory
Head = tuple[int, str]  # the newest entry's number and digest


class Abandoned(Exception):
    """The check was ended before it came to the end of the trail."""


@dataclass
class _Run:
    """A check of the whole trail that is under way: who asks for one meanwhile waits for this one."""

    done: Future[list[str]] = field(default_factory=Future)
    joined: bool = False  # somebody, since the last page was asked for
    shared: bool = False  # somebody, ever
    again: int = (
        0  # up to this number entries had been read when the last of them came, who must know how they are since
    )

    def turns(self, after: int) -> None:
        """The entries behind number ``after`` are read next."""
        if self.joined:
            self.joined, self.again = False, after


class Trail:
    """What this process knows of the trail, for any thread. Without a ``head`` only the chain itself is checked."""

    def __init__(self, look: Callable[[], AbstractContextManager[Session]], head: Path | None) -> None:
        self.head = head
        self._look = look
        self._noting = threading.Lock()
        self._refused: str | None = None  # why the head could not move on
        self._found: list[str] = []  # what the last check of the whole chain found
        self._leaving = threading.Event()
        self._joining = threading.Lock()
        self._run: _Run | None = None  # that takes others in
        if head is not None:
            with suppress(OSError):  # told of by the first change
                # Once: a data folder that is lost later must not come back empty, in the way of the one to be put back.
                head.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def problems(self) -> list[str]:
        """The signs of tampering known here, the first hundred at most; empty where the trail is whole as far as is known."""
        refused = [self._refused] if self._refused and self._refused not in self._found else []
        return [*refused, *self._found]

    def follow(self, first: int | None = None, *, accept: bool = False) -> None:
        """Move the head on to the newest entry, where the trail still holds the entry it names; else keep it, and say so.

        ``first`` is the first entry of the change that was made, None where none was; ``accept`` moves the head in any case.
        That change is done: what fails here is logged, and made up for by the next.
        """
        if self.head is None:
            return
        try:
            with locked(self.head) as file:  # the lock is the file's own, which is therefore never replaced
                refused = self._moved(file, first, accept)
        except (OSError, SQLAlchemyError) as error:
            log.warning("the audit trail's head in %s stays behind until the next change: %s", self.head, error)
            return
        self._note(refused, self._found)

    def check(self, pause: float = 0.0) -> list[str]:
        """Everything that shows tampering in the whole trail, from its first entry to the head.

        Reads pages in transactions of their own and waits ``pause`` seconds between them. Raises SQLAlchemyError; Abandoned
        after ``leave``.
        """
        return self.checking(pause).result()

    def checking(self, pause: float = 0.0) -> Future[list[str]]:
        """``check`` on a thread of its own, or the one that is under way, which then reads once more what it had read by now: all
        who wait for it hear of every entry as it was after they had asked, and of all that the head knew then.
        """
        with self._joining:
            if self._run is not None:
                self._run.joined = self._run.shared = True
                return self._run.done
            run = self._run = _Run()
        run.done.set_running_or_notify_cancel()  # from now on nobody's leaving ends it for the others
        try:
            threading.Thread(target=self._go, args=(run, pause), name="unbind-trail", daemon=True).start()
        except RuntimeError as error:  # the system has no thread to give
            self._failed(run, error)
        return run.done

    def _go(self, run: _Run, pause: float) -> None:
        try:
            found = self._whole(run, pause)
            self._note(self._refused if found else None, found[:REMEMBERED])
        except BaseException as error:  # noqa: BLE001 - whoever waits hears of it
            self._failed(run, error)
        else:
            run.done.set_result(found)

    def _failed(self, run: _Run, error: BaseException) -> None:
        with self._joining:
            self._run = None if self._run is run else self._run
        run.done.set_exception(error)

    def _whole(self, run: _Run, pause: float) -> list[str]:
        kept, damaged = self.kept()
        last = 0

        def read() -> Iterator[dict[str, Any]]:
            nonlocal last
            for entry in self.entries(pause=pause, turns=run.turns):
                yield entry
                last = entry["id"]

        found = [*damaged, *audit.problems(read(), kept)]
        with self._joining:  # who comes from now on begins anew
            run.turns(last)
            self._run = None
        if run.again:
            # with the entry behind them, whose predecessor they must end with; where there is none, the head knows their end
            former = takewhile(lambda entry: entry["id"] <= run.again + 1, self.entries(pause=pause))
            head = kept if kept is not None and kept[0] <= run.again else None
            found += [problem for problem in audit.problems(former, head) if problem not in found]
        moved, damaged = self.kept() if run.shared else (kept, [])
        found += [problem for problem in damaged if problem not in found]
        if (
            moved is not None and moved != kept
        ):  # over entries that may have been deleted before the page of them was read
            behind = audit.problems(self.entries(moved[0] - 1, pause), moved, first=moved[0])
            found += [problem for problem in behind if problem not in found]
        return found

    def kept(self) -> tuple[Head | None, list[str]]:
        """The head as it is kept, and what is wrong with its file."""
        if self.head is None or not self.head.exists():
            return None, []
        return _parsed(self.head.read_text(encoding="ascii", errors="replace"))

    def entries(
        self, after: int = 0, pause: float = 0.0, turns: Callable[[int], None] = lambda _: None
    ) -> Iterator[dict[str, Any]]:
        """The entries that follow number ``after``, in order; ``turns`` hears after which number each page begins, before it is
        read. Raises Abandoned.
        """
        while True:
            turns(after)
            with self._look() as session:
                page = audit.rows(session, after=after, limit=PAGE)
            if not page:
                return
            yield from page
            after = page[-1]["id"]
            if self._leaving.wait(pause):
                raise Abandoned

    def leave(self) -> None:
        """End a check that is under way."""
        self._leaving.set()

    def _moved(self, file: IO[str], first: int | None, accept: bool) -> str | None:
        """Move the head in its open file; why it may not move, None where it did or need not."""
        kept, damaged = _parsed(file.read())
        if damaged and not accept:
            return damaged[0]
        if kept is None or accept:
            with self._look() as session:
                end = audit.newest(session)
            if end is not None and first != 1 and not accept:  # there were entries before, and so was a head
                log.warning(
                    "no head of the audit trail was kept in %s; it is from now on. At the first start with this data folder that "
                    "is as it should be; else somebody took it away, and entries missing at the end would not show",
                    self.head,
                )
        else:
            end = kept

            def passing() -> Iterator[dict[str, Any]]:
                nonlocal end
                for entry in self.entries(kept[0] - 1):
                    yield entry
                    end = entry["id"], entry["digest"]

            if refused := next(audit.problems(passing(), kept, first=kept[0]), None):
                return refused
        if end is not None and end != kept:
            file.seek(0)
            file.write(f"{end[0]} {end[1]}\n")
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        return None

    def _note(self, refused: str | None, found: list[str]) -> None:
        with self._noting:
            before, self._refused, self._found = self.problems, refused, found
            now = self.problems
        if now and not before:
            log.error("the audit trail is not whole: %s; see `unbind audit verify`", now[0])
        elif before and not now:
            log.warning("the audit trail is whole again")


def read_head(path: Path) -> Head | None:
    """The head in a file, None where there is none."""
    try:
        return _parsed(path.read_text(encoding="ascii", errors="replace"))[0]
    except OSError:
        return None


def _parsed(text: str) -> tuple[Head | None, list[str]]:
    if not text.strip():  # a file that was made and not yet written to
        return None, []
    number, _, digest = text.strip().partition(" ")
    if number.isdecimal() and number.isascii() and len(digest) == 64:
        return (int(number), digest), []
    return None, ["head: its file does not hold the end of a trail (number and digest); it was damaged or written over"]


def unguarded(engine: Engine) -> list[str]:
    """The triggers that refuse changes of the audit trail and that are not there as they were made, each with its remedy."""
    with engine.connect() as connection:
        made = {row[0]: row[1] for row in connection.execute(text(_FOUND_GUARDS[engine.dialect.name]))}
    return [
        f"{name} {'is not as it was made' if name in made else 'is missing'}, so that entries of the audit trail can be changed: "
        f"find out who did that, drop what is there of that name, and run `{statement}`"
        for name, statement in _GUARDS[engine.dialect.name].items()
        if made.get(name) != statement
    ]


# What the database is to refuse, as the migration that made the audit trail has it; PostgreSQL tells it in its own words.
_SAYS = "'rows of the audit trail are never changed'"
_GUARDS = {
    "sqlite": {
        f"audit_no_{what.lower()}": f"CREATE TRIGGER audit_no_{what.lower()} BEFORE {what} ON audit "
        f"BEGIN SELECT RAISE(ABORT, {_SAYS}); END"
        for what in ("UPDATE", "DELETE")
    },
    "postgresql": {
        "audit_no_change": "CREATE TRIGGER audit_no_change BEFORE DELETE OR UPDATE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse()",
        "audit_refuse": "CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION {_SAYS}; END $$",
    },
}
_FOUND_GUARDS = {
    "sqlite": "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'audit'",
    "postgresql": "SELECT tgname, pg_get_triggerdef(oid, true) FROM pg_trigger "
    "WHERE tgrelid = to_regclass('audit') AND tgenabled IN ('O', 'A') AND NOT tgisinternal "
    "UNION ALL SELECT proname, 'CREATE FUNCTION ' || proname || '() RETURNS trigger LANGUAGE plpgsql AS $$' || prosrc || '$$' "
    "FROM pg_proc WHERE oid IN (SELECT tgfoid FROM pg_trigger WHERE tgrelid = to_regclass('audit'))",
}
