"""``/admin/v1``: what its routes have in common: the key, who acts, and how the registry's refusals are answered.

Routes that only ask the registry are plain functions, which run in threads: a database that does not answer holds up nobody else.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from sqlalchemy.exc import OperationalError

from server.errors import ApiError
from server.registry.audit import Actor
from server.registry.refusals import KeyReused, NameTaken, NotAllowed, NotThere, Refusal, Stale, Unconditional
from server.service import Service, service

Served = Annotated[Service, Depends(service)]

# refusal -> status, code, the parameter it is about
_ANSWERS: dict[type[Refusal], tuple[int, str, str | None]] = {
    NotThere: (404, "not_found", None),
    KeyReused: (409, "idempotency_key_reused", "Idempotency-Key"),
    NameTaken: (409, "name_taken", "name"),
    NotAllowed: (409, "not_allowed", None),
    Stale: (412, "stale", "If-Match"),
    Unconditional: (428, "if_match_required", "If-Match"),
}


async def admin_key(request: Request, authorization: Annotated[str | None, Header()] = None) -> None:
    """Let nobody pass without ``Authorization: Bearer <admin key>``."""
    scheme, _, given = (authorization or "").partition(" ")
    expected = service(request).admin_key
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), expected.encode()):
        raise ApiError(
            401,
            "this route needs the admin key: send 'Authorization: Bearer KEY' (the server printed it at its start)",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def admin_router() -> APIRouter:
    """A router whose every route needs the admin key."""
    return APIRouter(prefix="/admin/v1", tags=["admin"], dependencies=[Depends(admin_key)])


def acting(request: Request) -> Actor:
    """Who acts, for the audit trail."""
    return Actor("admin", request.client.host if request.client else "")


Acting = Annotated[Actor, Depends(acting)]
IfMatch = Annotated[str | None, Header(max_length=200)]


@contextmanager
def refusals() -> Iterator[None]:
    """Answer what the registry refuses, and 503 where it cannot be reached."""
    try:
        yield
    except Refusal as error:
        status, code, param = _ANSWERS[type(error)]
        raise ApiError(status, str(error), param=param, code=code) from None
    except OperationalError:
        raise ApiError(
            503, "the registry's database does not answer; try again", code="registry_unreachable",
            headers={"Retry-After": "5"},
        ) from None  # fmt: skip
