"""The page at ``/`` and the rows it offers to try."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import FileResponse

from server.api.caller import holder
from server.console.rows import demo_rows
from server.service import Service, service

router = APIRouter(include_in_schema=False)
PAGE = Path(__file__).resolve().parent.parent / "console" / "index.html"
HEADERS = {  # no other page may show this one in a frame, and have it clicked
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
}
_cached_rows = lru_cache(maxsize=1)(demo_rows)


@router.get("/")
async def page() -> FileResponse:
    """The console."""
    return FileResponse(PAGE, media_type="text/html", headers=HEADERS)


@router.get("/console/state.json", dependencies=[Depends(holder("inference"))])
async def state(served: Annotated[Service, Depends(service)]) -> dict[str, Any]:
    """The model, the modules and, in the demo world, rows to try. Forget sets of others are never shown."""
    return {
        "model": served.settings.served_name,
        "modules": [
            {"name": name, "label": entry.label} for name, entry in sorted(served.engine.modules.current.items())
        ],
        "rows": _cached_rows() if served.settings.is_demo else [],
    }
