"""Is it alive, is it ready, how is it doing: ``/health``, ``/ready``, ``/metrics``, ``/version``."""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.errors import ApiError
from server.policy import unavailable
from server.service import Service, service

router = APIRouter(tags=["health"])
Served = Annotated[Service, Depends(service)]


@router.get("/health")
async def health() -> dict[str, str]:
    """200 while the process answers."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(served: Served) -> dict[str, Any]:
    """200 once requests are served; 503 before, while shutting down and while an enforced module is missing."""
    if not served.ready:
        raise ApiError(503, "the server is starting or shutting down", code="not_ready", headers={"Retry-After": "2"})
    if missing := served.missing_modules:
        raise unavailable(missing[0])
    return {
        "status": "ready",
        "model": served.settings.served_name,
        "modules": sorted(served.engine.modules.current),
        **({"audit": problems} if (problems := served.registry.trail.problems) else {}),
    }


@router.get("/metrics")
async def metrics(served: Served) -> Response:
    """Prometheus text."""
    counts = await asyncio.wrap_future(served.engine.gate_counts())
    text = served.telemetry.exposition(
        counts, served.engine.stats(), len(served.engine.modules.current), len(served.scan.problems)
    )
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def show_version() -> dict[str, str]:
    """Which release this is."""
    try:
        return {"version": version("unbind-server")}
    except PackageNotFoundError:
        return {"version": "unreleased"}
