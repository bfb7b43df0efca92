"""One module in place of those of several takedowns, which keep their records, rows and guards: ``options.joins`` has their ids.

What many small modules cost ordinary code adds up, so that one module of all their rows costs less. When it becomes active theirs
are superseded in the same transaction. Where it is superseded by one that has not all of those rows, what it superseded comes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, String, cast, select
from sqlalchemy.orm import Session

from server.registry.audit import rows_about
from server.registry.lifecycle import LIVE
from server.registry.refusals import NotAllowed
from server.registry.tables import Kind, ModuleRow, ModuleState, RulesRow, Takedown


def joined_by(options: Mapping[str, Any]) -> Collection[str]:
    """The takedowns whose modules one with these options is to stand in for, by id."""
    return options.get("joins") or ()


def check_rows(session: Session, options: Mapping[str, Any]) -> None:
    """Raise NotAllowed where rows of a takedown that these options join were purged since they were read: whoever purged them was
    told that they are deleted.
    """
    gone = select(Takedown.id).where(Takedown.id.in_(joined_by(options)), Takedown.purged_at.is_not(None))
    if found := session.scalars(gone.order_by(Takedown.created_at)).first():
        raise NotAllowed(
            f"options.joins: the rows of {found} have been deleted meanwhile; leave it out, or give them again"
        )


def stands_for(session: Session, row: ModuleRow) -> Collection[str]:
    """The same of a module."""
    takedown = session.get(Takedown, row.takedown_id) if row.takedown_id and row.kind == Kind.MODULE else None
    return joined_by(takedown.options) if takedown is not None else ()


def superseding(session: Session, takedown_id: str | None) -> Collection[str]:
    """The takedowns whose modules go when that of this one is active. What rules have demanded by name since it was asked for
    stays: nobody was told, and every request under them would be refused.
    """
    takedown = session.get(Takedown, takedown_id) if takedown_id else None
    joined = joined_by(takedown.options) if takedown is not None else ()
    if takedown is None or not joined:
        return ()
    said = session.scalars(select(RulesRow.rules).where(RulesRow.updated_at > takedown.created_at)).all()
    demanded = {name for rules in said for part in ("modules", "enforced") for name in rules.get(part) or ()}
    mine = (ModuleRow.kind == Kind.MODULE) & (ModuleRow.name != takedown.name) & ModuleRow.name.in_(demanded)
    stays = select(ModuleRow.takedown_id).where(mine, ModuleRow.takedown_id.in_(joined), ModuleRow.state.in_(LIVE))
    return set(joined) - set(session.scalars(stays))


def replaced(row: ModuleRow, joined: Collection[str]) -> ColumnElement[bool]:
    """What is live of its name, and of those takedowns, for the same model: what was made of their rows, and no later version."""
    mine = (ModuleRow.kind == row.kind) & (ModuleRow.fingerprint == row.fingerprint) & (ModuleRow.id != row.id)
    stood = (ModuleRow.name == row.name) | ModuleRow.takedown_id.in_(joined if row.kind == Kind.MODULE else ())
    return mine & stood & ModuleRow.state.in_(LIVE)


def joiners(session: Session) -> Mapping[str, Sequence[str]]:
    """By takedown those that have its rows among theirs, directly or by one that they join, the oldest first."""
    said = cast(Takedown.options, String).contains('"joins"')
    rows = session.execute(select(Takedown.id, Takedown.options).where(said).order_by(Takedown.created_at))
    direct = {identifier: joined_by(options) for identifier, options in rows}
    found: dict[str, list[str]] = defaultdict(list)
    for identifier, joins in direct.items():
        within, waiting = set[str](), [*joins]
        while waiting:  # not by age: a clock may have gone back between two of them
            if (one := waiting.pop()) not in within:
                within.add(one)
                waiting += direct.get(one, ())
        for one in within:
            found[one].append(identifier)
    return found


def keepers(session: Session, takedown: Takedown, joining: Collection[str]) -> tuple[list[str], list[str]]:
    """The other takedowns whose rows are not purged and which have the very same ones, and those of its joiners, ``joining``, which
    have them among others.
    """
    kept = select(Takedown.id).where(Takedown.id != takedown.id, Takedown.purged_at.is_(None))
    kept = kept.order_by(Takedown.created_at)
    same = list(session.scalars(kept.where(Takedown.forget_digest == takedown.forget_digest)))
    among = [one for one in joining if one not in same]
    return same, list(session.scalars(kept.where(Takedown.id.in_(among)))) if among else []


def left(session: Session, ended: ModuleRow, new: Collection[str] = ()) -> Sequence[ModuleRow]:
    """What this module stands in for and nothing does once it is out of use, of what modules that join it superseded: the newest
    first, as one may have the rows of others. ``new``: takedowns whose modules are about to be active.
    """
    joining = joiners(session) if stands_for(session, ended) else {}
    within = {one for one, by in joining.items() if ended.takedown_id in by}
    if not within:
        return ()
    live = select(ModuleRow.name, ModuleRow.takedown_id, ModuleRow.state).where(
        ModuleRow.kind == Kind.MODULE, ModuleRow.fingerprint == ended.fingerprint, ModuleRow.state.in_(LIVE)
    )
    others = session.execute(live.where(ModuleRow.id != ended.id)).all()
    names = {ended.name, *(one.name for one in others)}
    standing = {*new, *(one.takedown_id for one in others if one.state == ModuleState.ACTIVE)}
    superseded = select(ModuleRow).where(ModuleRow.takedown_id.in_(within), ModuleRow.state == ModuleState.SUPERSEDED)
    superseded = superseded.where(ModuleRow.kind == Kind.MODULE, ModuleRow.fingerprint == ended.fingerprint)
    rows = session.scalars(superseded.order_by(ModuleRow.created_at.desc())).all()
    said = {entry["subject"]: entry["detail"].get("by") for entry in rows_about(session, [row.id for row in rows])}
    made_by = select(ModuleRow.id, ModuleRow.takedown_id).where(ModuleRow.id.in_(set(said.values())))
    by = {one.id: one.takedown_id for one in session.execute(made_by)}
    found = []
    for row in rows:
        joins = joining[str(row.takedown_id)]
        held = standing.intersection([row.takedown_id, *joins])
        if not held and row.name not in names and by.get(said.get(row.id)) in joins:
            found.append(row)
            names.add(row.name)
            standing.add(row.takedown_id)
    return found
