"""``/admin/v1/takedowns``: what is to be forgotten comes in here and becomes a job; the worker process takes it from there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from typing import Annotated, Any, TypeVar

from fastapi import Header, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse

from server.api.admin.bodies import TakedownBody, TakedownFields, TakedownOptions
from server.api.admin.intake import Intake, from_json, from_upload
from server.api.admin.routes import Acting, Served, admin_router, refusals
from server.api.characters import check_characters
from server.api.profiles import scopes
from server.errors import ApiError
from server.registry import retention
from server.registry.files import has_forget, purge, save_forget
from server.registry.lifecycle import InForce, bound
from server.registry.refusals import Refusal
from server.service import Service
from unbind_core.encoding import encode
from unbind_core.errors import DataError, InsufficientRows
from unbind_core.fitting.options import possible_layers
from unbind_core.rows import MINIMUM_FORGET_ROWS, forget_digest

router = admin_router()
T = TypeVar("T", bound=BaseModel)


@router.post("/takedowns", status_code=202)
async def post_takedown(
    request: Request,
    served: Served,
    actor: Acting,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> JSONResponse:
    """Queue the making of a module that forgets the rows given: 202 with the job to follow, and what the module will bind.

    JSON with ``rows``, or multipart with a ``file`` (JSONL, .zip or .tar.gz) and the other fields as JSON texts.
    """
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        async with request.form(max_files=1, max_fields=200) as form:
            fields, intake = await _from_form(form)
    else:
        body = _validated(TakedownBody, _json(await request.body(), "the body"))
        fields, intake = body, await asyncio.to_thread(from_json, body.rows)
    gate = fields.options.gate
    if gate != "auto" and len(intake.rows) < MINIMUM_FORGET_ROWS:
        raise InsufficientRows(
            f"rows: {len(intake.rows)} different; options.gate '{gate}' needs {MINIMUM_FORGET_ROWS}, 'auto' needs one"
        )
    options = _checked_options(served, fields.options)
    positions = await asyncio.to_thread(_positions, served, intake)
    with refusals():
        told = await asyncio.to_thread(_told, served, fields)
    if fields.options.dry_run:
        expected = await asyncio.to_thread(served.registry.jobs.expected, len(intake.rows))
        return JSONResponse(
            {
                "dry_run": True,
                "rows": len(intake.rows),
                "duplicates_dropped": intake.duplicates_dropped,
                "files_skipped": intake.files_skipped,
                "positions": positions,
                "seconds": expected or None,
                "total_seconds": round(sum(expected.values()), 1) if expected else None,
                **told,
            }
        )
    with refusals():
        job, new = await asyncio.to_thread(_submit, served, fields, options, intake, actor, idempotency_key)
    answer = {
        "takedown_id": job["takedown_id"],
        "job_id": job["id"],
        "module": fields.name,
        "state": job["state"],
        "rows": len(intake.rows),
        "duplicates_dropped": intake.duplicates_dropped,
        "files_skipped": intake.files_skipped,
        "positions": positions,
        "created": new,
        **told,
    }
    return JSONResponse(answer, 202, headers={"Location": f"/admin/v1/jobs/{job['id']}"})


def _told(served: Service, fields: TakedownFields) -> dict[str, Any]:
    """What the module will bind, and what whoever posts may not have meant."""
    scope, warnings = fields.options.scope, []
    if scope is None:
        warnings.append(
            "options.scope: none was given, so the module will be available and not enforced: it binds "
            f"{bound(None)}. To enforce it give 'global', 'profile:NAME' or 'key:ID'"
        )
    warnings += [
        f"options.scope: version {record['version']} of '{fields.name}' is enforced and binds {bound(record['scope'])}; "
        f"the version that supersedes it will bind {bound(scope)}"
        for record in served.registry.modules.live(served.loaded.identity.fingerprint)
        if record["name"] == fields.name and record["in_force"] == InForce.ENFORCED and record["scope"] != scope
    ]
    return {
        "scope": scope,
        "in_force": InForce.NONE,
        "binds": f"nothing yet; once its module is active, {bound(scope)}",
        "warnings": warnings,
    }


def _submit(
    served: Service, fields: TakedownFields, options: dict[str, Any], intake: Intake, actor: Any, key: str | None
) -> tuple[dict[str, Any], bool]:
    data_dir, digest = served.settings.data_dir, forget_digest(intake.rows)
    kept_before = has_forget(data_dir, digest)
    save_forget(data_dir, intake.rows)
    # Not the canonical form: digests that are kept already, for keys that may still be used again, were written so.
    given = {"name": fields.name, "rows": digest, "notice": fields.notice.model_dump(), "options": options}
    try:
        return served.registry.takedowns.submit(
            name=fields.name,
            row_count=len(intake.rows),
            forget_digest=digest,
            notice=fields.notice.model_dump(exclude_none=True),
            options=options,
            request_digest=hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest(),
            idempotency_key=key,
            fingerprint=served.loaded.identity.fingerprint,
            actor=actor,
            now=time.time(),
        )
    except Refusal:
        if not kept_before:
            purge(data_dir, digest, ())  # nothing refers to the rows
        raise


@router.get("/takedowns")
def list_takedowns(served: Served, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
    """The newest first, without their rows."""
    with refusals():
        return {"object": "list", "data": served.registry.takedowns.newest(limit)}


@router.get("/takedowns/{takedown_id}")
def show_takedown(takedown_id: str, served: Served) -> dict[str, Any]:
    """One takedown with its jobs and modules, without its rows."""
    with refusals():
        return served.registry.takedowns.get(takedown_id)


@router.post("/takedowns/{takedown_id}/purge")
def purge_takedown(takedown_id: str, served: Served, actor: Acting) -> dict[str, Any]:
    """Delete the rows and what was left of them; record, digest and module stay."""
    with refusals():
        return retention.purge(served.registry, served.settings, takedown_id, actor)


async def _from_form(form: FormData) -> tuple[TakedownFields, Intake]:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "file: give the forget set as a file part: JSONL, .zip or .tar.gz", param="file")
    known = {"file", "name", "notice", "options", "include", "exclude"}
    if unknown := sorted(set(form) - known):
        raise ApiError(400, f"{unknown[0]}: unknown part; known are {', '.join(sorted(known))}", param=unknown[0])
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


def _checked_options(served: Service, options: TakedownOptions) -> dict[str, Any]:
    """The options as the worker reads them: plain values, times as seconds."""
    count = served.loaded.identity.num_layers
    if any(layer >= count for layer in options.layers or []):
        raise ApiError(400, f"options.layers: the model has layers 0 to {count - 1}", param="options.layers")
    possible = possible_layers(options.gate, count)
    if not set(options.layers or []) <= set(possible):
        stands = f"gate '{options.gate}' stands at {', '.join(map(str, possible))} of {count} layers; leave layers out"
        raise ApiError(400, f"options.layers: {stands}", param="options.layers")
    if options.policy == "rewrite" and options.gate != "auto":
        raise ApiError(
            400, f"options.policy: gate '{options.gate}' knows silent alone; use gate 'auto'", param="options.policy"
        )
    if options.gate == "paper-strict" and options.budgets is not None:
        raise ApiError(
            400,
            "options.budgets: gate 'paper-strict' holds the paper's own; leave them out, or use gate 'paper'",
            param="options.budgets",
        )
    if options.scope is not None and options.scope not in scopes(served):
        raise ApiError(
            400,
            f"options.scope: '{options.scope}' does not exist; make the key or the profile first",
            param="options.scope",
        )
    plain = options.model_dump(exclude={"dry_run"}, exclude_defaults=True, exclude_none=True)
    for field in ("effective_at", "expires_at"):
        if (at := getattr(options, field)) is not None:
            plain[field] = at.timestamp()
    if options.effective_at is not None and options.activation != "auto":
        raise ApiError(
            400,
            "options.effective_at: goes with activation 'auto'; otherwise activate when it is due",
            param="options.effective_at",
        )
    if plain.get("expires_at", float("inf")) <= max(time.time(), plain.get("effective_at", 0.0)):
        raise ApiError(400, "options.expires_at: lies before the module would be active", param="options.expires_at")
    return plain


def _positions(served: Service, intake: Intake) -> int:
    """Continuation tokens over all rows. Raises DataError for a row whose prompt no request could bring."""
    tokenizer = served.loaded.tokenizer
    limit = int(getattr(served.loaded.model.config, "max_position_embeddings", None) or 2**31)
    total = 0
    for number, row in enumerate(intake.rows):
        if len(row.prompt) > limit and (length := len(encode(tokenizer, row.prompt))) >= limit:
            raise DataError(
                f"row {number + 1}: its prompt has {length} tokens, and the model's context {limit}; shorten the prompt"
            )
        total += len(encode(tokenizer, row.continuation))
    return total
