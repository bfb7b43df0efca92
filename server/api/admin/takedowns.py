"""``/admin/v1/takedowns``: what is to be forgotten comes in here and becomes a job; the worker process takes it from there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse

from server.api.admin.bodies import TakedownBody, TakedownFields
from server.api.admin.expected import plan_of, positions
from server.api.admin.intake import Intake, from_json, from_upload
from server.api.admin.joined import joined, joined_before
from server.api.admin.options import checked_options
from server.api.admin.routes import Acting, Served, admin_router, newest_access, refusals
from server.api.admin.warned import Asked, superseding_of, warnings_of
from server.api.characters import check_characters
from server.api.profiles import unreached
from server.base_service import BaseService
from server.engine.refusals import EngineStopped
from server.errors import ApiError, invalid
from server.guarding import build_guard, kept_guard
from server.registry import retention
from server.registry.audit import Actor
from server.registry.lifecycle import InForce, bound
from server.registry.objects import StoreUnreachable
from server.registry.private.files import TakedownFiles
from server.registry.refusals import AWAY, Refusal
from unbind_core.errors import DataError, InsufficientRows, RowsTooShort
from unbind_core.guard.index import GuardIndex
from unbind_core.rows import MINIMUM_FORGET_ROWS, forget_digest

router = admin_router()
T = TypeVar("T", bound=BaseModel)


@router.post("/takedowns", status_code=202, dependencies=[Depends(newest_access)])
async def post_takedown(
    request: Request,
    served: Served,
    actor: Acting,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> JSONResponse:
    """Guard the rows given from now on, and queue the making of a module that forgets them: 202 with the job to follow, and what
    is bound by then.

    JSON with ``rows``, or multipart with a ``file`` (JSONL, .zip or .tar.gz) and the other fields as JSON texts.
    """
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        async with request.form(max_files=1, max_fields=200) as form:
            fields, intake = await _from_form(form)
    else:
        body = _validated(TakedownBody, _json(await request.body(), "the body"))
        fields, intake = body, await asyncio.to_thread(from_json, body.rows)
    posted = ""
    if fields.options.joins:
        posted = _request_digest(fields, forget_digest(intake.rows), fields.options.model_dump(mode="json"))
        with refusals():
            made = await asyncio.to_thread(_made, served, fields, idempotency_key, posted)
            # What the same request joined before is superseded by now, maybe, and its names may mean others.
            work = joined if made is None else partial(joined_before, made=made)
            fields, intake = await asyncio.to_thread(work, served, fields, intake)
    gate, fits = fields.options.gate, fields.options.protect != "guard"
    if fits and gate != "auto" and len(intake.rows) < MINIMUM_FORGET_ROWS:
        raise InsufficientRows(
            f"rows: {len(intake.rows)} different; options.gate '{gate}' needs {MINIMUM_FORGET_ROWS}, 'auto' needs one"
        )
    asked = Asked(fields, checked_options(served, fields.options), intake, posted)
    plan, against = await asyncio.to_thread(plan_of, served, intake.rows, asked.options) if fits else (None, [])
    answer: dict[str, Any] = {
        "rows": len(intake.rows),
        "duplicates_dropped": intake.duplicates_dropped,
        "files_skipped": intake.files_skipped,
        "positions": await asyncio.to_thread(positions, served, intake) if fits else None,
        "plan": plan,
    }
    with refusals():
        superseding = await asyncio.to_thread(superseding_of, served, fields)
        if fields.options.dry_run:
            guard = await asyncio.to_thread(_guard, served, asked)
            expected = await asyncio.to_thread(served.registry.jobs.expected, len(intake.rows)) if fits else {}
            first = "module" if guard is None else "guard"
            return JSONResponse(
                {
                    "dry_run": True,
                    **answer,
                    "seconds": expected or None,
                    "total_seconds": round(sum(expected.values()), 1) if expected else None,
                    "guard": guard.facts if guard else None,
                    "scope": fields.options.scope,
                    "in_force": InForce.NONE,
                    "binds": f"nothing yet; once its {first} is active, {bound(fields.options.scope)}",
                    "warnings": [*against, *warnings_of(asked, guard.facts if guard else None), *superseding],
                }
            )
        job, new = await asyncio.to_thread(_submit, served, asked, plan, actor, idempotency_key)
        takedown = await asyncio.to_thread(served.registry.takedowns.get, job["takedown_id"])
    if takedown["guard"] is not None:
        with suppress(EngineStopped, *AWAY):  # it is written, and loaded at the next look
            await served.offer.refresh()  # the answer comes once it guards
    answer = {
        "takedown_id": job["takedown_id"],
        "job_id": job["id"],
        "module": fields.name,
        "state": job["state"],
        **answer,
        "created": new,
        **{name: takedown[name] for name in ("guard", "scope", "in_force", "binds")},
        "warnings": [*against, *warnings_of(asked, takedown["guard"]), *superseding],
    }
    return JSONResponse(answer, 202, headers={"Location": f"/admin/v1/jobs/{job['id']}"})


def _guard(served: BaseService, asked: Asked) -> GuardIndex | None:
    """The guard that is asked for; none where nobody asked and every row is too short for one. Raises ApiError."""
    options = asked.fields.options
    if options.protect == "module":
        return None
    try:
        return build_guard(asked.fields.name, asked.intake.rows, asked.options, served.guard_secret)
    except RowsTooShort as error:
        if options.protect is None and options.guard is None:
            return None
        raise ApiError(400, str(error), param="options.guard.run", code="bad_rows") from None
    except DataError as error:
        raise ApiError(400, str(error), param=str(error).partition(":")[0], code="bad_rows") from None


def _submit(
    served: BaseService, asked: Asked, plan: Mapping[str, Any] | None, actor: Actor, key: str | None
) -> tuple[dict[str, Any], bool]:
    """Guard and rows into their files, then the records of both in one transaction; what is refused, or finds no room, leaves
    neither.
    """
    takedowns, files, fields, options = (
        served.registry.takedowns,
        TakedownFiles(served.settings),
        asked.fields,
        asked.options,
    )
    rows = asked.intake.rows

    def keep() -> None:
        if not files.has_forget(digest):
            files.save_forget(rows)

    digest, fingerprint = forget_digest(rows), served.model_fingerprint
    request_digest = asked.posted or _request_digest(fields, digest, options)
    same = takedowns.known(fields.name, fingerprint, fields.options.replace, key, request_digest, time.time())
    if same is not None:
        return same, False
    index, guard, saved = _guard(served, asked), None, False
    try:
        files.save_forget(rows)  # here, as a slow store is to hold up no change of others
        saved = True
        if index is not None:  # last: of a guard that is posted twice at once none is to lose the other's file
            guard = kept_guard(index, options, served.objects, fields.notice.reference)
        return takedowns.submit(
            name=fields.name,
            row_count=len(rows),
            forget_digest=digest,
            notice=fields.notice.model_dump(exclude_none=True),
            options=options,
            request_digest=request_digest,
            idempotency_key=key,
            fingerprint=fingerprint,
            actor=actor,
            now=time.time(),
            guard=guard,
            plan=plan,
            served={"fingerprint": fingerprint, "dtype": served.settings.dtype},
            module=fields.options.protect != "guard",
            keep=keep,  # looked at again, as a purge or another post's refusal may have taken them away since
        )
    except (Refusal, OSError, *AWAY) as error:
        away = isinstance(error, StoreUnreachable)
        with suppress(OSError, *AWAY):  # else `unbind db sweep` does so later, and retention
            if guard is not None:
                retention.drop_file(served.registry, served.objects, guard.file)
            if saved or not away:
                takedowns.drop_unrecorded([digest], files.purge)
        if away:
            raise ApiError(
                503, f"{error}; try again", code="store_unreachable", headers={"Retry-After": "10"}
            ) from None
        raise


def _made(served: BaseService, fields: TakedownFields, key: str | None, posted: str) -> str | None:
    """The takedown that the same request made before."""
    if key is None or fields.options.dry_run:
        return None
    known, replaces = served.registry.takedowns.known, fields.options.replace
    job = known(fields.name, served.model_fingerprint, replaces, key, posted, time.time())
    return job["takedown_id"] if job is not None else None


def _request_digest(fields: TakedownFields, rows: str, options: Mapping[str, Any]) -> str:
    """Not the canonical form: digests that are kept already, for keys that may still be used again, were written so."""
    given = {"name": fields.name, "rows": rows, "notice": fields.notice.model_dump(), "options": options}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


@router.get("/takedowns")
def list_takedowns(
    served: Served,
    after: Annotated[str, Query(max_length=100, description="id of the takedown that the list goes on behind")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    find: Annotated[str, Query(max_length=200, description="text that their name or their notice holds")] = "",
) -> dict[str, Any]:
    """The newest first, without their rows."""
    with refusals("takedown"):
        found = served.registry.takedowns.newest(limit + 1, partial(unreached, served), after, find)
    return {"object": "list", "data": found[:limit], "has_more": len(found) > limit}


@router.get("/takedowns/{takedown_id}")
def show_takedown(takedown_id: str, served: Served) -> dict[str, Any]:
    """One takedown with its jobs, modules and guard, without its rows."""
    with refusals():
        return served.registry.takedowns.get(takedown_id, partial(unreached, served))


@router.post("/takedowns/{takedown_id}/purge")
def purge_takedown(takedown_id: str, served: Served, actor: Acting) -> dict[str, Any]:
    """Delete the rows and what was left of them; record, digest, module and guard stay."""
    with refusals():
        return retention.purge(served.registry, served.settings, takedown_id, actor)


async def _from_form(form: FormData) -> tuple[TakedownFields, Intake]:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise invalid("file: give the forget set as a file part: JSONL, .zip or .tar.gz", "file", "invalid_value")
    known = {"file", "name", "notice", "options", "include", "exclude"}
    if unknown := sorted(set(form) - known):
        raise invalid(f"{unknown[0]}: unknown part; known are {', '.join(sorted(known))}", unknown[0], "invalid_value")
    given: dict[str, Any] = {"name": form.get("name")}
    for part in ("notice", "options"):
        if isinstance(text := form.get(part), str):
            given[part] = _json(text.encode(errors="replace"), part)
    globs = {kind: [str(glob) for glob in form.getlist(kind)] for kind in ("include", "exclude")}
    fields = _validated(TakedownFields, given)
    return fields, await asyncio.to_thread(from_upload, await file.read(), globs["include"], globs["exclude"])


def _json(text: bytes, what: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError(400, f"{what} is not valid JSON", code="invalid_json") from None
    check_characters(value)
    return value


def _validated(kind: type[T], value: Any) -> T:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        found = [{**item, "loc": ("body", *item["loc"])} for item in error.errors(include_url=False)]
        raise RequestValidationError(found) from None
