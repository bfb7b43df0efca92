"""Why the registry refuses a change. The API answers these with 404, 409, 412 and 428; the worker obeys them."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from sqlalchemy import ExceptionContext
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from unbind_core.errors import UnbindError

# What a database raises that does not answer, or cannot write. InternalError is how PostgreSQL's driver says that it ended a
# transaction which stood still.
AWAY = (OperationalError, InterfaceError, InternalError, PoolTimeout)
ADDRESSES = (
    "give sqlite:///FILE, with %3F for a ? and %25 for a % in its name, or postgresql+psycopg://USER@HOST/NAME, or with a standby "
    "postgresql+psycopg://USER@/NAME?host=HOST1:5432&host=HOST2:5432&target_session_attrs=read-write"
)


class Refusal(Exception):
    """Base of all refusals; the message names the field or record and the remedy."""


class NotThere(Refusal):
    """No such record."""


class KeyReused(Refusal):
    """An Idempotency-Key came back with another body."""


class NameTaken(Refusal):
    """A module of this name exists or is being made."""


class RowsPurged(Refusal):
    """The rows that the work needs were deleted."""


class NotAllowed(Refusal):
    """The lifecycle does not know this transition; the message lists those it knows."""


class Stale(Refusal):
    """The record changed since the caller looked at it."""


class AlreadyThere(Refusal):
    """What was to be made is there already; somebody else may have made it meanwhile."""


class Unconditional(Refusal):
    """A change that does not say which revision it is meant for."""


class JointOutdated(Exception):
    """The modules in force are not those that a module's joint cost was measured beside: measure it again."""


class LeaseLost(Exception):
    """Another worker has the job, or nobody: whatever this one still does must not be written."""


class CancelRequested(Exception):
    """Somebody asked for the job to stop."""


class DatabaseRefused(UnbindError):
    """The database cannot be used as it is; the message says what to do."""


def unusable(error: OSError) -> DatabaseRefused:
    """The refusal of a database's file that this account may not make, open or keep from others, or has no folder to lie in."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        folder = Path(error.filename)
        there = "a link that leads nowhere" if folder.is_symlink() and not folder.exists() else "a file"
        return DatabaseRefused(
            f"the registry's folder {folder}: {there} is in its place; give a folder as data_dir or in database_url"
        )
    remedy = "the account that runs this must own it and its folder: change their owner"
    if error.errno == errno.EROFS:
        remedy = "mount it so that it can be written to, or copy its folder to where it can"
    return DatabaseRefused(
        f"the registry's database file {error.filename}: {error.strerror}; {remedy}, or choose another data_dir or database_url"
    )


def no_registry(file: Path) -> DatabaseRefused:
    """The refusal to make a registry for what only reads one: whoever gave a wrong folder would be told that all is well."""
    return DatabaseRefused(
        f"no registry at {file.absolute()}; give the server's --data-dir (or UNBIND_DATA_DIR, or its database_url), "
        "or start the server once"
    )


def unanswered(error: Exception) -> DatabaseRefused:
    """What whoever sits at a command line is told of one of ``AWAY``, with the remedy where the database tells of its disk."""
    if isinstance(error, (DatabaseDamaged, DatabaseGone, DatabaseForbidden, DatabaseReads)):
        return DatabaseRefused(str(error))
    said = str(getattr(error, "orig", None) or error)
    if re.search("disk is full|disk I/O error|readonly database", said):  # SQLite says the second of a full disk too
        return DatabaseRefused(
            f"the database cannot be read or written ({said}): make room on its disk, and see that it can be written to"
        )
    return DatabaseRefused(f"the database cannot be reached: {said}")


class DatabaseDamaged(OperationalError):
    """The database's file does not hold what was written there. For whoever waits out an outage it is one."""

    lasting = True  # what lies elsewhere in the file may still be read, and the file does not heal

    def __init__(self, file: Path, reason: object) -> None:
        super().__init__(None, None, Exception(str(reason)))
        self.message = (
            f"the registry's database file {file} is damaged ({reason}): stop what uses it, keep the file for whoever looks "
            "into it, put a copy in its place (docs/operations/data.md, Backup and restore), and start again"
        )

    def __str__(self) -> str:
        return self.message


class DatabaseGone(OperationalError):
    """The database's file was removed or replaced while it was open. For whoever waits out an outage it is one."""

    def __init__(self, message: str) -> None:
        super().__init__(None, None, Exception(message))
        self.message = message

    def __str__(self) -> str:
        return self.message


class DatabaseForbidden(OperationalError):
    """PostgreSQL does not let this role do what is asked of it. For whoever waits out an outage it is one."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, None, Exception(reason))
        self.message = (
            f"the registry's database does not let the role in database_url do this ({reason}): that role must own the database, "
            "as by CREATE DATABASE NAME OWNER ROLE, and the tables in it; upgrade and serve as one role"
        )

    def __str__(self) -> str:
        return self.message


class DatabaseReads(OperationalError):
    """PostgreSQL only takes reads. For whoever waits out an outage it is one."""

    def __init__(self) -> None:
        self.message = (
            "the registry's database only takes reads, as a standby does; try again once database_url leads to the primary "
            "(of several hosts: target_session_attrs=read-write)"
        )
        super().__init__(None, None, Exception(self.message))

    def __str__(self) -> str:
        return self.message


def tell_apart(context: ExceptionContext) -> None:
    """For SQLAlchemy's event ``handle_error``. Raises DatabaseForbidden, DatabaseReads."""
    match getattr(context.original_exception, "sqlstate", None):
        case "42501":  # PostgreSQL's insufficient_privilege
            raise DatabaseForbidden(str(context.original_exception).partition("\n")[0]) from None
        case "25006":  # read_only_sql_transaction
            # Its connections stay open when another becomes the primary: all are made anew, which may lead there.
            context.is_disconnect = True
            raise DatabaseReads from None
