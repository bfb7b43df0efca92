"""``/admin/v1/takedowns/{id}/evidence``: what was done about a takedown, signed."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import Query
from starlette.responses import HTMLResponse, JSONResponse, Response

from server.api.admin.routes import Served, admin_router, refusals
from server.evidence.bundle import evidence

router = admin_router()


@router.get("/takedowns/{takedown_id}/evidence", responses={200: {"content": {"text/html": {}}}})
async def show_evidence(
    takedown_id: str, served: Served, form: Annotated[Literal["json", "html"], Query(alias="format")] = "json"
) -> Response:
    """The signed document; with ``format=html`` the page in it alone, which carries no signature."""
    with refusals():
        document = await asyncio.to_thread(evidence, served.registry, served.settings, takedown_id, served.described)
    if form == "html":
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        return HTMLResponse(document["html"], headers={"Content-Security-Policy": policy})
    return JSONResponse(
        document, headers={"Content-Disposition": f'attachment; filename="{takedown_id}.evidence.json"'}
    )
