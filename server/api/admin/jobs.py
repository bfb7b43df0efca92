"""``/admin/v1/jobs``: what the worker does, to look at, to follow, to stop and to try again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Query
from starlette.responses import StreamingResponse

from server.api.admin.routes import Acting, Served, admin_router, refusals
from server.base_service import BaseService
from server.errors import ApiError
from server.registry.tables import ENDED, ModuleState
from unbind_core.canonical import canonical_json

router = admin_router()
EVENT_SECONDS = 0.5
SILENCE_SECONDS = 10.0  # proxies close streams that say nothing


@router.get("/jobs")
async def list_jobs(
    served: Served,
    after: Annotated[str, Query(max_length=100, description="id of the job that the list goes on behind")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """The newest jobs first."""
    with refusals("job"):
        found = await asyncio.to_thread(served.registry.jobs.newest, time.time(), limit + 1, after)
    jobs, more = found[:limit], len(found) > limit
    await _offer_published(served, jobs)
    return {"object": "list", "data": jobs, "has_more": more}


@router.get("/jobs/{job_id}")
async def show_job(job_id: str, served: Served) -> dict[str, Any]:
    """Where a job is. Once it says ``succeeded``, the next request can name its module."""
    return await _look(served, job_id)


@router.get(
    "/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def follow_job(job_id: str, served: Served) -> StreamingResponse:
    """Server-sent events: the job whenever it changes, ``event: progress``, and at its end ``event: end``."""
    first = await _look(served, job_id)

    async def events() -> AsyncIterator[str]:
        job, told, spoke = first, "", time.monotonic()
        while True:
            shown = {key: value for key, value in job.items() if key not in ("elapsed_seconds", "eta_seconds")}
            ended = job["state"] in ENDED
            if (text := canonical_json(shown)) != told:
                told, spoke = text, time.monotonic()
                yield f"event: {'end' if ended else 'progress'}\ndata: {json.dumps(job)}\n\n"
            elif time.monotonic() - spoke > SILENCE_SECONDS:
                spoke = time.monotonic()
                yield ": still here\n\n"
            if ended or not served.ready:  # a server that ends has ended its worker: nothing more will come
                return
            await asyncio.sleep(EVENT_SECONDS)
            try:
                job = await _look(served, job_id)
            except ApiError as error:  # the answer has begun: an outage is waited out
                if error.code != "registry_unreachable":
                    return

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


@router.post("/jobs/{job_id}/cancel")
def cancel_job(job_id: str, served: Served, actor: Acting) -> dict[str, Any]:
    """Ask a job to stop; one that has ended stays as it is."""
    with refusals():
        return served.registry.jobs.request_cancel(job_id, actor, time.time())


@router.post("/jobs/{job_id}/retry")
def retry_job(job_id: str, served: Served, actor: Acting) -> dict[str, Any]:
    """Queue a failed or cancelled job again; finished stages are not repeated."""
    with refusals():
        return served.registry.jobs.retry(job_id, actor, time.time())


async def _look(served: BaseService, job_id: str) -> dict[str, Any]:
    with refusals():
        job = await asyncio.to_thread(served.registry.jobs.get, job_id, time.time())
    await _offer_published(served, [job])
    return job


async def _offer_published(served: BaseService, jobs: list[dict[str, Any]]) -> None:
    """Load what finished jobs made active before telling that they finished."""
    fresh = {
        job["id"]
        for job in jobs
        if job["outcome"] in (ModuleState.ACTIVE, ModuleState.SHADOW) and "digest" in (job["result"] or {})
    }
    if not fresh <= served.offered:
        await served.offer.refresh()
        served.offered |= fresh
