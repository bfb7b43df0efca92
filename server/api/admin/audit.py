"""``/admin/v1/audit``: what was done, by whom, to what, in order; and whether the trail is whole."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

from server.api.admin.routes import Served, admin_router, refusals

router = admin_router()


@router.get("/audit")
def list_audit(
    served: Served, after: Annotated[int, Query(ge=0, lt=2**31)] = 0, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> dict[str, Any]:
    """The rows that follow number ``after``."""
    with refusals():
        return {"object": "list", "data": served.registry.audit(after, limit)}


@router.get("/audit/verify")
def verify_audit(served: Served) -> dict[str, Any]:
    """Everything that shows tampering, measured against the head that is kept outside the database."""
    with refusals():
        problems = served.registry.audit_problems()
    return {"object": "audit.verification", "whole": not problems, "problems": problems}
