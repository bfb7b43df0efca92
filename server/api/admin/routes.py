"""``/admin/v1``: what its routes have in common: the key, who acts, and how the registry's refusals are answered.

Routes that only ask the registry are plain functions, which run in threads: a database that does not answer holds up nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Request
from fastapi.dependencies.models import Dependant

from server.api.caller import Caller, administrator
from server.base_service import BaseService, base_service
from server.errors import ApiError, invalid, unreachable
from server.registry.audit import Actor
from server.registry.refusals import (
    AWAY,
    AlreadyThere,
    KeyReused,
    NameTaken,
    NotAllowed,
    NotThere,
    Refusal,
    RowsPurged,
    Stale,
    Unconditional,
)

Served = Annotated[BaseService, Depends(base_service)]

# refusal -> status, code, the parameter it is about
_ANSWERS: dict[type[Refusal], tuple[int, str, str | None]] = {
    NotThere: (404, "not_found", None),
    KeyReused: (409, "idempotency_key_reused", "Idempotency-Key"),
    NameTaken: (409, "name_taken", "name"),
    RowsPurged: (409, "rows_not_kept", None),
    NotAllowed: (409, "not_allowed", None),
    Stale: (412, "stale", "If-Match"),
    AlreadyThere: (412, "already_there", "If-None-Match"),
    Unconditional: (428, "if_match_required", "If-Match"),
}


def admin_router(*more: Callable[..., object]) -> APIRouter:
    """A router whose every route needs a key with the admin scope, and a data folder that keeps what is done; and ``more``."""
    needed = [
        Depends(administrator),
        Depends(_kept),
        Depends(_without_nul),
        Depends(_known),
        *(Depends(one) for one in more),
    ]
    return APIRouter(prefix="/admin/v1", tags=["admin"], dependencies=needed)


def newest_access(served: Served) -> None:
    """Have keys, profiles and policies as any server wrote them last: the next call may come to another than the one before."""
    if not served.away:  # else as they were read last, and nobody waits for a registry that says nothing
        with suppress(Exception):  # what reads them by the clock tells of it
            served.access.refresh()


async def _kept(served: Served) -> None:
    if (lost := served.data_lost) is not None:
        raise ApiError(503, lost, code="data_lost", headers={"Retry-After": "60"})


async def _without_nul(request: Request) -> None:
    # No name has one, and PostgreSQL takes no text with it, not even to look for.
    if "\0" in request.url.path:
        raise ApiError(400, "the path holds a NUL character, which no name has", code="invalid_value")
    if field := next((name for name, value in request.query_params.multi_items() if "\0" in value), None):
        raise ApiError(400, f"{field}: holds a NUL character, which no name has", param=field, code="invalid_value")


async def _known(request: Request) -> None:
    # Left out of account, "?all=true" would be answered as if nothing were asked for.
    known = _parameters(request.scope["route"].dependant)
    if field := next((name for name in request.query_params if name not in known), None):
        there = f"this route takes {', '.join(sorted(known))}" if known else "this route takes none"
        raise invalid(f"{field[:64]}: unknown parameter; {there}", field[:64], "invalid_value")


def _parameters(dependant: Dependant) -> set[str]:
    """The names of a route's parameters in the address behind the path."""
    below = (name for part in dependant.dependencies for name in _parameters(part))
    return {*(field.alias for field in dependant.query_params), *below}


def acting(request: Request, caller: Annotated[Caller, Depends(administrator)]) -> Actor:
    """Who acts, for the audit trail: the id of their key, or "admin" for the server's own admin key."""
    return Actor(caller.key.id if caller.key else "admin", request.client.host if request.client else "")


Acting = Annotated[Actor, Depends(acting)]
IfMatch = Annotated[str | None, Header(max_length=200)]
IfNoneMatch = Annotated[Literal["*"] | None, Header(description="only where there is none yet")]


@contextmanager
def refusals(listed: str = "") -> Iterator[None]:
    """Answer what the registry refuses, 503 where it cannot be reached, and 507 where it cannot write. ``listed``: what a list is
    of, which can only miss the record that it is to go on behind.
    """
    try:
        yield
    except Refusal as error:
        if listed and isinstance(error, NotThere):
            raise invalid(f"after: no {listed} has this id; begin anew", "after", "invalid_value") from None
        status, code, param = _ANSWERS[type(error)]
        raise ApiError(status, str(error), param=param, code=code) from None
    except AWAY as error:
        raise unreachable(error) from None
