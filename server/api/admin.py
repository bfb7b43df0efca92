"""``/admin/v1``: takedowns in, jobs and modules to look at. Every route needs the admin key.

A takedown becomes a job row; the worker process takes it from there.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr
from starlette.responses import JSONResponse

from server.api.caller import administrator
from server.errors import ApiError
from server.registry.files import save_forget
from server.registry.registry import KeyReused, NameTaken, NotThere
from server.service import Service, service
from unbind_core.errors import InsufficientRows
from unbind_core.rows import MINIMUM_FORGET_ROWS, forget_row

Served = Annotated[Service, Depends(service)]
MAX_ROWS = 100_000


router = APIRouter(prefix="/admin/v1", tags=["admin"], dependencies=[Depends(administrator)])


class TakedownOptions(BaseModel):
    """How to fit."""

    model_config = ConfigDict(extra="forbid")
    layers: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 0


class TakedownBody(BaseModel):
    """What somebody asks to have forgotten."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    rows: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ROWS)]
    notice: dict[str, Any] = {}
    options: TakedownOptions = TakedownOptions()


@router.post("/takedowns", status_code=202)
async def post_takedown(
    body: TakedownBody,
    served: Served,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> JSONResponse:
    """Queue the making of a module that forgets ``rows``; 202 with the job to follow."""
    rows = [forget_row(row, f"rows.{index}") for index, row in enumerate(body.rows)]
    if len(rows) < MINIMUM_FORGET_ROWS:
        raise InsufficientRows(
            f"rows: {len(rows)} given; at least {MINIMUM_FORGET_ROWS} are needed to fit and to check"
        )
    layers = body.options.layers or []
    count = served.loaded.identity.num_layers
    if any(layer >= count for layer in layers):
        raise ApiError(400, f"options.layers: the model has layers 0 to {count - 1}", param="options.layers")
    digest = hashlib.sha256(json.dumps(body.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
    try:
        job, new = served.registry.submit(
            name=body.name,
            row_count=len(rows),
            forget_digest=save_forget(served.settings.data_dir, rows),
            notice=body.notice,
            options=body.options.model_dump(),
            request_digest=digest,
            idempotency_key=idempotency_key,
            existing=served.engine.modules.current.keys(),
            now=time.time(),
        )
    except KeyReused as error:
        raise ApiError(409, str(error), param="Idempotency-Key", code="idempotency_key_reused") from None
    except NameTaken as error:
        raise ApiError(409, str(error), param="name", code="name_taken") from None
    answer = {"takedown_id": job["takedown_id"], "job_id": job["id"], "module": body.name, "state": job["state"]}
    return JSONResponse({**answer, "created": new}, 202, headers={"Location": f"/admin/v1/jobs/{job['id']}"})


@router.get("/jobs")
async def list_jobs(served: Served, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
    """The newest jobs first."""
    jobs = served.registry.jobs(time.time(), limit)
    await _offer_published(served, jobs)
    return {"object": "list", "data": jobs}


@router.get("/jobs/{job_id}")
async def show_job(job_id: str, served: Served) -> dict[str, Any]:
    """Where a job is. Once it says ``succeeded``, the next request can name its module."""
    try:
        job = served.registry.job(job_id, time.time())
    except NotThere as error:
        raise ApiError(404, str(error), param="job_id", code="job_not_found") from None
    await _offer_published(served, [job])
    return job


async def _offer_published(served: Service, jobs: list[dict[str, Any]]) -> None:
    """Load what finished jobs published before telling that they finished."""
    loaded = served.engine.modules.current
    if any(job["outcome"] == "active" and job["module"] not in loaded for job in jobs):
        await served.refresh_modules()


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(job_id: str, served: Served) -> dict[str, Any]:
    """Ask a job to stop; one that has ended stays as it is."""
    try:
        return served.registry.request_cancel(job_id, time.time())
    except NotThere as error:
        raise ApiError(404, str(error), param="job_id", code="job_not_found") from None


@router.get("/modules")
async def list_modules(served: Served) -> dict[str, Any]:
    """The modules a request can name, where they are from, and the files that could not be loaded and why."""
    await served.refresh_modules()
    made = {module["digest"]: module for module in served.registry.modules()}
    data = []
    for name in sorted(served.engine.modules.current):
        entry = served.engine.modules.describe(name)
        origin = made.get(entry["digest"])
        stored = served.scan.modules.get(name)
        data.append(
            {
                **entry,
                "state": "active",
                "file": str(stored.path) if stored else None,
                "job_id": origin["job_id"] if origin else None,
                "takedown_id": origin["takedown_id"] if origin else None,
            }
        )
    problems = [{"file": file, "reason": reason} for file, reason in sorted(served.scan.problems.items())]
    return {"object": "list", "data": data, "problems": problems}
