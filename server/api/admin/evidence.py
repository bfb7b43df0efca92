"""``/admin/v1/takedowns/{id}/evidence``: what was done about a takedown, signed."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import Query
from starlette.responses import HTMLResponse, JSONResponse, Response

from server.api.admin.routes import Served, admin_router, refusals
from server.errors import ApiError
from server.evidence.bundle import evidence
from server.registry.private.store import Unreadable

router = admin_router()


@router.get("/takedowns/{takedown_id}/evidence", responses={200: {"content": {"text/html": {}}}})
async def show_evidence(
    takedown_id: str, served: Served, form: Annotated[Literal["json", "html"], Query(alias="format")] = "json"
) -> Response:
    """The signed document; with ``format=html`` the page in it alone, which carries no signature."""
    with refusals():
        try:
            document = await asyncio.to_thread(
                evidence, served.registry, served.settings, takedown_id, served.described
            )
        except Unreadable as error:
            lost = "Where that cannot be, purge the takedown: then there is evidence without the report and samples"
            raise ApiError(409, f"{error}. {lost}", code="private_file_unreadable") from None
    if form == "html":
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        return HTMLResponse(document["html"], headers={"Content-Security-Policy": policy})
    return JSONResponse(
        document, headers={"Content-Disposition": f'attachment; filename="{takedown_id}.evidence.json"'}
    )
