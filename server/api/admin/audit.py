"""``/admin/v1/audit``: what was done, by whom, to what, in order; and whether the trail is whole."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import Query

from server.api.admin.routes import Served, admin_router, refusals
from server.registry.audit import Wanted
from server.registry.trail import PAUSE_SECONDS

router = admin_router()
Said = Annotated[str, Query(max_length=200)]


@router.get("/audit")
def list_audit(
    served: Served,
    after: Annotated[int, Query(ge=0, lt=2**31, description="number of the row that the list goes on behind")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Annotated[Literal["oldest", "newest"], Query(description="which rows come first")] = "oldest",
    action: Annotated[Said, Query(description="an action, or the first word of several: 'key', 'job'")] = "",
    actor: Said = "",
    subject: Said = "",
) -> dict[str, Any]:
    """The rows that follow number ``after`` in the order asked for; of one action, actor or subject where these are given."""
    with refusals():
        found = served.registry.audit(after, limit + 1, Wanted(action, actor, subject), newest_first=order == "newest")
    return {"object": "list", "data": found[:limit], "has_more": len(found) > limit}


@router.get("/audit/verify")
async def verify_audit(served: Served) -> dict[str, Any]:
    """Everything that shows tampering, measured against the head that is kept outside the database. Who asks while it is being
    checked waits for the same check, which then reads again what it had read before.
    """
    with refusals():
        problems = await asyncio.shield(asyncio.wrap_future(served.registry.trail.checking(PAUSE_SECONDS)))
    return {"object": "audit.verification", "whole": not problems, "problems": problems}
