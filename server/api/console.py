"""The console at ``/``: its page, the scripts and styles beside it, and what they ask for first."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.api.caller import Caller, holder
from server.console.rows import demo_rows
from server.errors import ApiError
from server.service import Service, service

router = APIRouter(include_in_schema=False)
FOLDER = Path(__file__).resolve().parent.parent / "console"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {  # no other page may show this one in a frame, and have it clicked
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_cached_rows = lru_cache(maxsize=1)(demo_rows)


@lru_cache(maxsize=1)
def files() -> dict[str, tuple[bytes, str, str]]:
    """All that is served, by its path under ``/console/``: bytes, media type, entity tag. There is nothing else to be had."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in TYPES:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.relative_to(FOLDER).as_posix()] = (body, TYPES[path.suffix], tag)
    return found


@router.head("/", include_in_schema=False)
@router.get("/")
async def page(request: Request) -> Response:
    """The console."""
    return await file("index.html", request)


@router.get("/console/state.json")
async def state(
    served: Annotated[Service, Depends(service)], caller: Annotated[Caller, Depends(holder("inference"))]
) -> dict[str, Any]:
    """The model, who asks and what they may, the modules and, in the demo world, rows to try. Forget sets of others are never
    shown. ``applies``: not in shadow, where it would only be measured.
    """
    modules = served.engine.modules.current
    return {
        "model": served.settings.served_name,
        "caller": {"name": caller.name, "scopes": sorted(caller.scopes)},
        "modules": [
            {
                "name": name,
                "label": modules[name].label if name in modules else None,
                "guard": name in served.guards.names,
                "applies": name in served.offer.applicable,
            }
            for name in sorted(modules.keys() | served.guards.names)
        ],
        "rows": _cached_rows() if served.settings.is_demo else [],
    }


@router.get("/console/{path:path}")
async def file(path: str, request: Request) -> Response:
    """A script or style of the console; 304 where the browser has it as it is. Raises ApiError 404."""
    if path not in files():
        raise ApiError(404, f"the console has no file '{path[:80]}'", code="not_found")
    body, media_type, tag = files()[path]
    headers = {**HEADERS, "ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers={**headers, "Content-Type": media_type})
