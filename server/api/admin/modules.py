"""``/admin/v1/modules``: versions of modules and guards, and every change of their state. Changes name the revision they mean."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query, Response
from starlette.responses import JSONResponse

from server.api.admin.guards import check_key
from server.api.admin.routes import Acting, IfMatch, Served, admin_router, refusals
from server.api.profiles import unreached
from server.base_service import BaseService
from server.errors import ApiError
from server.registry.lifecycle import LIVE, Action, here, reached
from server.registry.objects import DamagedObject
from server.registry.private.files import TakedownFiles
from server.registry.refusals import AWAY, JointOutdated, NotAllowed
from server.registry.tables import JobKind, Kind, ModuleState
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule

router = admin_router()
WITHHELD = (
    "suspended in this server process only: the registry cannot be written now. It is written as soon as it can be; make room "
    "in the data folder. Until then other servers go on with the module, and so does this one after a restart."
)


@router.get("/modules")
async def list_modules(
    served: Served,
    state: Annotated[Literal["loaded", "all"], Query()] = "loaded",
    name: str | None = None,
    after: Annotated[str, Query(max_length=100, description="id of the module that the list goes on behind")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """The modules and guards a request can name, by name, and the files that could not be loaded and why; or all versions."""

    def loaded(row: Any) -> bool:
        return _loaded(served, row.kind, row.name, row.digest, row.state)

    with refusals("module of this list"):
        await served.offer.refresh()
        records = await asyncio.to_thread(
            served.registry.modules.listed, name, limit + 1, after, loaded if state == "loaded" else None
        )
    data = [_described(served, record) for record in records]
    found = {**served.offer.scan.problems, **served.offer.guards.problems}
    problems = [{"file": file, "reason": reason} for file, reason in sorted(found.items())]
    return {"object": "list", "data": data[:limit], "has_more": len(data) > limit, "problems": problems}


@router.get("/modules/{reference}")
def show_module(reference: str, served: Served, response: Response) -> dict[str, Any]:
    """One module or guard by id; by name, the version for this model that is loaded, else its newest; ``guard:NAME`` for a guard.

    ``refused`` says of a module for another model or quantisation what it is for, what runs here, and the remedy.
    """
    with refusals():
        record = served.registry.modules.get(reference)
    response.headers["ETag"] = record["etag"]
    return {**_described(served, record), **_of_another_model(served, record)}


@router.post("/modules/{reference}/activate")
async def activate(
    reference: str, served: Served, actor: Acting, if_match: IfMatch = None, override: bool = False
) -> JSONResponse:
    """Make a version available, and enforce it in its scope; the one before it is superseded.

    Beside other modules in force a module's joint cost is measured first: then the answer is 202 with the job that does it and,
    where the budgets hold, activates. ``override`` activates at once.
    """
    modules, beside = served.registry.modules, None if override else ()
    with refusals():
        try:
            check_key(served, await asyncio.to_thread(modules.get, reference))
            changed = await asyncio.to_thread(
                modules.act, reference, Action.ACTIVATE, if_match, actor, time.time(), beside
            )
        except JointOutdated:
            record = await asyncio.to_thread(modules.get, reference)
            create = served.registry.jobs.create
            job = await asyncio.to_thread(create, JobKind.ACTIVATE, record, {"etag": if_match}, actor, time.time())
            return JSONResponse(
                {"job_id": job["id"], "module": record}, 202, {"Location": f"/admin/v1/jobs/{job['id']}"}
            )
        except NotAllowed as error:
            raise NotAllowed(f"{error}{await asyncio.to_thread(_waiting, served, reference)}") from None
        return await _changed(served, changed)


@router.post("/modules/{reference}/rollback")
async def rollback(reference: str, served: Served, actor: Acting, if_match: IfMatch = None) -> JSONResponse:
    """Activate the version before this one, which is superseded."""
    with refusals():
        changed = await asyncio.to_thread(
            served.registry.modules.rollback, reference, if_match, actor, time.time(), partial(check_key, served)
        )
        return await _changed(served, changed)


@router.post("/modules/{reference}/verify")
def verify(reference: str, served: Served, actor: Acting, adopt: bool = False) -> JSONResponse:
    """Measure before and after once more, by a job. The forget rows must still be kept.

    A module of another model, dtype or quantisation is refused by the job. With ``adopt`` it is measured on the model as it runs,
    by the rule of a fit, and where it holds a new version of it is made for this model; else nothing is.
    """
    with refusals():
        record = served.registry.modules.get(reference)
        if record["kind"] == Kind.GUARD:
            raise ApiError(
                409, f"{record['id']} is a guard, which holds exactly: there is nothing to measure", code="not_allowed"
            )
        takedown = served.registry.takedowns.get(record["takedown_id"]) if record["takedown_id"] else None
        if takedown is None or not TakedownFiles(served.settings).has_forget(takedown["forget_digest"]):
            raise ApiError(
                409,
                f"module {record['id']} cannot be verified: its forget rows are not kept here",
                code="rows_not_kept",
            )
        kind = JobKind.ADOPT if adopt else JobKind.VERIFY
        job = served.registry.jobs.create(kind, record, {}, actor, time.time())
    return JSONResponse({"job_id": job["id"]}, 202, {"Location": f"/admin/v1/jobs/{job['id']}"})


@router.post("/modules/{reference}/{action}")
async def change(
    reference: str,
    action: Literal["shadow", "suspend", "retire"],
    served: Served,
    actor: Acting,
    if_match: IfMatch = None,
) -> JSONResponse:
    """Put a module into shadow (measured, not applied), out of use for a while, or out of use for good."""
    return await _change(served, reference, Action(action), if_match, actor)


async def _change(
    served: BaseService, reference: str, action: Action, if_match: str | None, actor: Any
) -> JSONResponse:
    modules = served.registry.modules
    left: list[str] = []
    with refusals():
        try:
            changed = await asyncio.to_thread(modules.act, reference, action, if_match, actor, time.time())
            with suppress(*AWAY):  # it is done, and told of all the same
                left = await asyncio.to_thread(served.registry.left, changed["id"])
        except (*AWAY, OSError):
            if action != Action.SUSPEND:
                raise
            # A module that does harm goes even where no change can be written, as on a full disk.
            changed = await asyncio.to_thread(modules.withhold, reference, if_match, actor, time.time())
        return await _changed(served, changed, left)


def _waiting(served: BaseService, reference: str) -> str:
    """Which newer version can be activated in place of one that is active: a name means that one."""
    record = served.registry.modules.get(reference)
    newer = [
        version
        for version in served.registry.modules.versions(record["name"])
        if all(version[same] == record[same] for same in ("kind", "fingerprint"))
        and version["version"] > record["version"]
        and Action.ACTIVATE in version["allowed"]
    ]
    if record["state"] != ModuleState.ACTIVE or not newer:
        return ""
    return (
        f"; version {newer[-1]['version']} is {newer[-1]['state']}: to activate that one give its id, {newer[-1]['id']}"
    )


async def _changed(served: BaseService, record: dict[str, Any], left: Sequence[str] = ()) -> JSONResponse:
    """``left``: superseded modules whose rows it has among its own, and that nothing stands in for now."""
    await served.offer.refresh()  # the answer comes once it is so
    described = _described(served, record)
    if left:
        described["warnings"] = [
            f"it has the rows of {', '.join(left)}, which stay superseded: until they are active, at most guards keep these back"
        ]
    return JSONResponse(described, 202 if "withheld" in described else 200, headers={"ETag": record["etag"]})


def _loaded(served: BaseService, kind: str, name: str, digest: str, state: str) -> bool:
    """Whether a version is what a request can name here now."""
    if kind == Kind.GUARD:  # the same rows, posted again, make the same file: it is loaded for the version that is live
        index = served.guards.indexes.get(name)
        return index is not None and index.digest == digest and state in LIVE
    stored, current = served.offer.scan.modules.get(name), served.modules.current.get(name)
    return stored is not None and current is not None and stored.digest == current.digest == digest


def _described(served: BaseService, record: dict[str, Any]) -> dict[str, Any]:
    loaded = _loaded(served, record["kind"], record["name"], record["digest"], record["state"])
    record = reached(record, unreached(served, record["scope"] or ""))
    if record["kind"] == Kind.GUARD:
        return {**record, "loaded": loaded, **_withheld(served, record)}
    if loaded:
        canary = served.canaries.about(record["name"], record["digest"])
        told = {"canary": canary} if canary else {}
        return {**served.modules.describe(record["name"]), **record, "loaded": True, **told}
    return {**here(record, served.model_fingerprint), "loaded": False, **_withheld(served, record)}


def _of_another_model(served: BaseService, record: dict[str, Any]) -> dict[str, Any]:
    """Read from its file, as the record has the fingerprint alone."""
    if served.loaded is None or record["kind"] == Kind.GUARD or record["fingerprint"] == served.model_fingerprint:
        return {}
    try:
        data = served.objects.get(record["file"], record["digest"])
        UnbindModule.from_bytes(data, record["file"]).require(served.loaded.identity)
    except (UnbindError, OSError, DamagedObject) as error:
        return {"refused": str(error)}
    return {}


def _withheld(served: BaseService, record: dict[str, Any]) -> dict[str, Any]:
    """Nothing of a record that says so itself: it is written a moment before this process knows."""
    waits = record["id"] in served.registry.modules.withheld and record["state"] != ModuleState.SUSPENDED
    return {"withheld": WITHHELD} if waits else {}
