"""Is it alive, is it ready, how is it doing, what is it: ``/health``, ``/ready``, ``/metrics``, ``/version``, ``/openapi.json``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse

from server.api.caller import Caller, holder, onlooker
from server.base_service import BaseService, base_service
from server.errors import ApiError, describe_refusals
from server.outage import apart
from server.policy import unavailable
from server.telemetry.build import release_of

router = APIRouter(tags=["health"])
Served = Annotated[BaseService, Depends(base_service)]


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """200 while the process answers."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(served: Served, request: Request) -> dict[str, Any]:
    """200 once requests are served; 503 before, while shutting down, without its data and while an enforced module is missing.

    A server that cannot see the registry or the store, or cannot write, is degraded and still 200: it goes on with what it has.

    Names of modules are for those with a key, where one is needed.
    """
    allowed = onlooker(request) is not None
    if not served.ready:
        raise ApiError(503, "the server is starting or shutting down", code="not_ready", headers={"Retry-After": "2"})
    if not served.computes:
        raise ApiError(
            503, "the engine has ended, or is being started again", code="not_ready", headers={"Retry-After": "10"}
        )
    if (lost := served.data_lost) is not None:
        raise ApiError(503, lost, code="data_lost", headers={"Retry-After": "60"})
    if missing := served.offer.missing_enforced:
        raise unavailable(", ".join(missing) if allowed else None)
    if served.settings.ready_needs_canary and (reason := _canary(served)):
        told = reason if allowed else "a canary has not found what it should"
        raise ApiError(503, told, code="canary_missed", headers={"Retry-After": "10"})
    missing = served.offer.missing_active
    reasons = [*served.away, *([f"active, and not loaded: {', '.join(missing)}"] if missing else [])]
    status = "degraded" if reasons else "ready"
    if not allowed:
        return {"status": status}
    return {
        "status": status,
        "model": served.title,
        "modules": sorted(served.modules.current),
        "guards": sorted(served.guards.names),
        "missing": missing,
        **({"reasons": reasons} if reasons else {}),
        **({"audit": problems} if (problems := served.registry.trail.problems) else {}),
    }


def _canary(served: BaseService) -> str:
    if served.canaries.pending:
        return "the canaries have not run yet"
    return "; ".join(served.canaries.misses(served.offer.enforced))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(served: Served, caller: Annotated[Caller, Depends(holder("metrics"))]) -> Response:
    """Prometheus text. Whoever may have reports sees the gates' counts as they are, others as they were read last."""
    current = caller.may("report") or caller.may("admin")
    gates = await served.gate_counts() if current else None
    # in a thread: that of a thousand modules takes a tenth of a second, and the loop must not stand still
    text = await apart(served.telemetry.exposition, gates)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False, dependencies=[Depends(holder("inference", "metrics"))])
async def describe(request: Request) -> dict[str, Any]:
    """The machine's description of the API."""
    # in a thread: it is built when first asked for, which takes a second
    found: dict[str, Any] = await apart(request.app.openapi)
    return describe_refusals(_for_generators(found))


def _for_generators(description: dict[str, Any]) -> dict[str, Any]:
    """The description without what makers of clients trip over: parameters that may be null, where they are left out instead,
    and defaults of what may be of several kinds, which these makers write in no kind's own terms.
    """
    for operations in description["paths"].values():
        for parameter in (one for operation in operations.values() for one in operation.get("parameters", ())):
            kinds = [kind for kind in parameter["schema"].pop("anyOf", ()) if kind != {"type": "null"}]
            parameter["schema"] |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {}
    for schema in description["components"]["schemas"].values():
        for field in schema.get("properties", {}).values():
            if "anyOf" in field or "$ref" in field:
                field.pop("default", None)
    return description


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def show_version() -> dict[str, str]:
    """Which release this is."""
    return {"version": release_of("unbind-server")}
