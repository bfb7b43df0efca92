"""A takedown that joins others (``options.joins``): their rows become its own, and its module stands in for theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from server.api.admin.bodies import TakedownFields
from server.api.admin.intake import Intake, checked
from server.base_service import BaseService
from server.errors import ApiError, invalid
from server.evidence.bundle import named_by
from server.registry.lifecycle import bound
from server.registry.private.files import TakedownFiles
from server.registry.refusals import NotThere
from server.registry.tables import Kind, ModuleState
from unbind_core.module_checks import name_problem
from unbind_core.rows import ForgetRow, forget_digest

Placed = list[tuple[str, ForgetRow]]
_WAITING = (ModuleState.CALIBRATED, ModuleState.SHADOW, ModuleState.SUSPENDED)


def joined(served: BaseService, fields: TakedownFields, intake: Intake) -> tuple[TakedownFields, Intake]:
    """The takedown with the ids of those that it joins, a scope that binds what theirs do, and the rows of all. Raises ApiError,
    OSError, StoreUnreachable, DataError, and NotThere where a takedown has gone meanwhile.
    """
    options = fields.options
    if options.expires_at is not None:
        raise _wrong("options.expires_at", "modules that are joined do not come back when it is over; leave it out")
    records = [_active(served, named, f"options.joins.{place}") for place, named in enumerate(options.joins)]
    records = list({record["takedown_id"]: record for record in records}.values())
    scope = _scope(served, fields, records)
    placed: Placed = []
    for record in records:
        placed += _rows(served, record)
    placed += zip(intake.places, intake.rows, strict=True)
    ids = sorted(record["takedown_id"] for record in records)
    with_scope = options.model_copy(update={"joins": ids, "scope": scope})
    return fields.model_copy(update={"options": with_scope}), checked(
        placed, intake.files_skipped, intake.cut, intake.short
    )


def joined_before(
    served: BaseService, fields: TakedownFields, intake: Intake, made: str
) -> tuple[TakedownFields, Intake]:
    """The same where the very same request ``made`` that takedown. Raises as ``joined``, without its refusals of what is joined."""
    record = {"name": fields.name, "takedown_id": made}
    options = served.registry.takedowns.get(made)["options"]
    said = fields.options.model_copy(update={"joins": options["joins"], "scope": options.get("scope")})
    return fields.model_copy(update={"options": said}), checked(
        _rows(served, record), intake.files_skipped, intake.cut, intake.short
    )


def missed_by_rules(served: BaseService, fields: TakedownFields) -> list[str]:
    """A warning for each module that rules demand and that is to be superseded."""
    records = served.registry.modules.live(served.model_fingerprint)
    theirs = [record["name"] for record in records if record["takedown_id"] in fields.options.joins]
    return [
        f"options.joins: {', '.join(rules)} demands '{name}', which is superseded once '{fields.name}' is active: from then on its "
        f"requests get 503, if '{name}' has no guard; take the name out of there first"
        for name in theirs
        if name != fields.name and (rules := _named_by(served, name))
    ]


def _active(served: BaseService, named: str, field: str) -> Mapping[str, Any]:
    """The record of a module of a takedown, by its name or the takedown's id, that is active or that an active one joins."""
    live = served.registry.modules.live(served.model_fingerprint)
    found = next((one for one in live if named in (one["takedown_id"], one["name"])), None)
    record: Mapping[str, Any] | None = found
    if record is None and name_problem(named) is None:  # of what else there is, PostgreSQL does not even look for a NUL
        made = _made(served, named)
        record = _stood_in_for(served, made, [one for one in live if one["state"] == ModuleState.ACTIVE])
        record = record or next((one for one in made[:1] if one["state"] in _WAITING), None)
    if record is None:
        raise _wrong(field, f"no module of '{named[:80]}' is active here; `unbind takedown list` says what there is")
    if record["state"] in _WAITING:  # as one that was over the budget, which is when joining is advised
        raise _wrong(
            field,
            f"module '{record['name']}' is {record['state']}, and what is active is joined; leave it out, or activate it before: "
            f"unbind module activate {record['name']} --override",
        )
    if record["takedown_id"] is None:
        raise _wrong(field, f"module '{record['name']}' came as a file, so that its rows are not known; leave it out")
    if record["expires_at"] is not None:
        raise _wrong(
            field, f"module '{record['name']}' expires, and joined its rows would be forgotten for good; leave it out"
        )
    return record


def _made(served: BaseService, named: str) -> list[dict[str, Any]]:
    """The records of modules of this name, or of this takedown, for the model that runs here, the newest first."""
    found: list[dict[str, Any]] = []
    with suppress(NotThere):  # as of a name
        found += served.registry.takedowns.get(named)["modules"]
    modules = [one for one in found or served.registry.modules.versions(named) if one["kind"] == Kind.MODULE]
    return [one for one in reversed(modules) if one["fingerprint"] == served.model_fingerprint]


def _stood_in_for(
    served: BaseService, made: Sequence[Mapping[str, Any]], active: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The newest superseded one of ``made`` whose rows one of the ``active`` has among its own."""
    for record in made:
        if record["state"] == ModuleState.SUPERSEDED and record["takedown_id"] is not None:
            joining = served.registry.takedowns.get(record["takedown_id"])["joined_by"]
            if any(one["takedown_id"] in joining for one in active):
                return record
    return None


def _scope(served: BaseService, fields: TakedownFields, records: Sequence[Mapping[str, Any]]) -> str | None:
    """Of the module that is to stand in for them all: no request that is bound now may be free then."""
    given, scopes = fields.options.scope, {record["scope"] for record in records}
    if given is None and len(scopes) > 1:
        said = "; ".join(f"'{record['name']}' binds {bound(record['scope'])}" for record in records)
        raise _wrong(
            "options.scope", f"the modules do not bind the same requests: {said}. Give 'global', or join fewer"
        )
    scope: str | None = given if given is not None else next(iter(scopes))
    if scope == "global":
        return scope
    for record in records:
        if record["scope"] not in (scope, None):
            raise _wrong(
                "options.scope",
                f"module '{record['name']}' binds {bound(record['scope'])}, and would be superseded by one that binds "
                f"{bound(scope)}; give 'global', or leave it out of options.joins",
            )
        if record["name"] != fields.name and (rules := _named_by(served, record["name"])):
            raise _wrong(
                "options.scope",
                f"{', '.join(rules)} demands '{record['name']}', and what stands in for it has another name; give 'global', or "
                "take the name out of there first",
            )
    return scope


def _rows(served: BaseService, record: Mapping[str, Any]) -> Placed:
    takedown = served.registry.takedowns.get(record["takedown_id"])
    gone = f"the rows of '{record['name']}' ({takedown['id']}) were deleted; leave it out, or give them again under its name"
    if takedown["purged_at"] is not None:
        raise _wrong("options.joins", gone)
    try:
        rows = TakedownFiles(served.settings).load_forget(takedown["forget_digest"])
    except FileNotFoundError:
        raise _wrong("options.joins", gone) from None
    if forget_digest(rows) != takedown["forget_digest"]:  # its module would go, and some of its rows with it
        raise _wrong(
            "options.joins",
            f"what is kept as the rows of '{record['name']}' ({takedown['id']}) is not what was given, so its file was damaged; "
            "restore it from a backup, leave it out, or give its rows again under its name",
        )
    return [(f"row {number} of '{record['name']}'", row) for number, row in enumerate(rows, 1)]


def _named_by(served: BaseService, name: str) -> list[str]:
    return named_by(served.access.current, served.settings, {name})


def _wrong(field: str, message: str) -> ApiError:
    return invalid(f"{field}: {message}", field, "invalid_value")
