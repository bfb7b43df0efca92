"""Who asks: the key in ``Authorization: Bearer``, ``api-key`` or ``x-api-key``, its scopes and its rate.

Without any key in the registry a server on loopback takes everybody for a caller who may infer. A key that is known is
held to its own rules everywhere.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request

from server.api.profiles import PROFILE_KEY, profile_rules
from server.base_service import BaseService, service_of
from server.errors import ApiError
from server.exposure import on_loopback
from server.registry.access import SCOPES, Key, key_digest

KEY_HEADERS = ("api-key", "x-api-key")
CALLER_KEY = "unbind.caller"  # where the caller stands who was found before the body was read


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request. ``key`` is None for the admin key and where no key is needed."""

    scopes: frozenset[str]
    key: Key | None = None

    @property
    def name(self) -> str | None:
        """The name of their key; None where they sent none, or none that is known."""
        return self.key.name if self.key is not None else "admin key" if self is ADMINISTRATOR else None

    @property
    def owner(self) -> str:
        """Whose prefixes they may take over: those of their own key; all who ask without one are one."""
        return self.key.id if self.key is not None else "admin" if self is ADMINISTRATOR else ""

    def may(self, scope: str) -> bool:
        """Whether a scope is among the caller's."""
        return scope in self.scopes


ADMINISTRATOR = Caller(frozenset(SCOPES))
ANYBODY = Caller(frozenset({"inference", "report", "metrics"}))


def keys_needed(served: BaseService) -> bool:
    """Whether inference needs a key: once one was ever made, and beyond loopback unless told otherwise."""
    open_to_all = on_loopback(served.settings) or served.settings.insecure
    return bool(served.access.current.keys) or not open_to_all


def identify(request: Request, now: float) -> Caller | None:
    """The caller whose key the request carries; None where it carries none that is known. Raises ApiError 401."""
    given = _given_key(request)
    if not given:
        return None
    served = service_of(request)
    if hmac.compare_digest(given.encode("utf-8", "surrogateescape"), served.admin_key.encode()):
        return ADMINISTRATOR
    key = served.access.current.keys.get(key_digest(given))
    if key is None:
        return None
    if not key.usable(now):
        state = "revoked" if key.revoked_at is not None else "expired"
        raise _unauthorised(f"the key '{key.name}' is {state}; ask for a new one")
    return Caller(key.scopes, key)


def admit(request: Request) -> Caller:
    """A caller who may infer, and has not asked too often; found once for each request, whose key may have been revoked or have
    expired while the body came. Raises ApiError 401, 403, 429.
    """
    found = request.scope.get(CALLER_KEY)
    if isinstance(found, Caller):
        if found.key is not None:
            identify(request, time.time())
        return found
    caller = request.scope[CALLER_KEY] = _admitted(request)
    return caller


def _admitted(request: Request) -> Caller:
    served = service_of(request)
    caller = identify(request, time.time())
    if caller is None:
        if keys_needed(served):
            raise _unknown(request, "this server needs a key: send 'Authorization: Bearer KEY'")
        return ANYBODY
    if not caller.may("inference"):
        raise _forbidden("inference")
    if (key := caller.key) is not None:
        now = time.monotonic()
        if key.tokens_per_minute is not None:
            _refuse_until(served.limiter.wait(*_tokens_of(key), now), key, f"use {key.tokens_per_minute:g} tokens")
        if key.per_minute is not None:
            _refuse_until(
                served.limiter.take(key.id, key.per_minute, key.burst, now), key, f"ask {key.per_minute:g} times"
            )
    return caller


def onlooker(request: Request) -> Caller | None:
    """Who looks at what the server is doing: None without a usable key, where one is needed.

    It is once one was made, and always beyond loopback: ``insecure`` opens inference alone.
    """
    served = service_of(request)
    try:
        caller = identify(request, time.time())
    except ApiError:
        return None
    open_to_all = on_loopback(served.settings) and not served.access.current.keys
    return ANYBODY if caller is None and open_to_all else caller


def holder(*scopes: str) -> Callable[[Request], Awaitable[Caller]]:
    """A dependency: an onlooker who has one of the scopes, or may do everything. Raises ApiError 401, 403."""

    async def check(request: Request) -> Caller:
        caller = onlooker(request)
        if caller is None:
            identify(request, time.time())  # says so of a key that is known and no longer good
            raise _unknown(request, f"{request.url.path} needs a key: send 'Authorization: Bearer KEY'")
        if not any(caller.may(scope) for scope in (*scopes, "admin")):
            raise _forbidden(scopes[0])
        return caller

    return check


def charge_answers(served: BaseService, caller: Caller, count: int) -> None:
    """Take the answers of a call off the key's rate; the call itself counted for one when it came. Raises ApiError 400, 429."""
    key = caller.key
    if key is None or key.per_minute is None or count <= 1:
        return
    if count > key.burst:
        raise ApiError(
            400,
            f"prompt: {count} answers in one call, and the key '{key.name}' may ask for {key.burst} at once; send fewer",
            param="prompt",
            code="batch_too_large",
        )
    now = time.monotonic()
    if served.limiter.take(key.id, key.per_minute, key.burst, now, count - 1) > 0:
        # it will be counted for one again when it comes back
        _refuse_until(
            served.limiter.wait(key.id, key.per_minute, key.burst, now, count), key, f"ask {key.per_minute:g} times"
        )


def charge_tokens(served: BaseService, caller: Caller, count: int) -> None:
    """Take tokens off the key's rate. They are used, so it may owe some: then it waits before its next call."""
    if caller.key is not None and caller.key.tokens_per_minute is not None:
        served.limiter.spend(*_tokens_of(caller.key), time.monotonic(), count)


def _tokens_of(key: Key) -> tuple[str, float, float]:
    """Name, rate and size of the bucket of a key's tokens: what a minute brings can be used at once."""
    rate = key.tokens_per_minute or 1.0
    return f"{key.id} tokens", rate, max(1.0, rate)


def _refuse_until(wait: float, key: Key, what: str) -> None:
    if wait > 0:
        raise ApiError(
            429,
            f"the key '{key.name}' may {what} a minute; the next request may come in {wait:.1f} s",
            code="rate_limited",
            headers={"Retry-After": str(math.ceil(wait))},
        )


def identified_administrator(request: Request) -> Caller:
    """A caller with the admin scope. Raises ApiError 401, 403."""
    caller = identify(request, time.time())
    if caller is None:
        raise _unknown(
            request,
            "this route needs the admin key: send 'Authorization: Bearer KEY' (admin.key in the server's data folder)",
            "send the admin key (admin.key in the server's data folder)",
        )
    if not caller.may("admin"):
        raise _forbidden("admin")
    return caller


async def inference(request: Request) -> Caller:
    """The dependency of routes that infer. Raises ApiError 401, 403, 429, and 404 where the path names a profile that is not there:
    who tries an address with a route that applies no modules must not take it for right.
    """
    caller = admit(request)
    if (profile := request.scope.get(PROFILE_KEY)) is not None:
        profile_rules(service_of(request), profile, asked=True)
    return caller


async def administrator(request: Request) -> Caller:
    """The dependency of the administrator's routes. Raises ApiError 401, 403."""
    return identified_administrator(request)


def _given_key(request: Request) -> str:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and given.strip():
        return given.strip()
    return next((value.strip() for name in KEY_HEADERS if (value := request.headers.get(name))), "")


def _unknown(request: Request, needed: str, instead: str = "send a key of this server, and all of it") -> ApiError:
    """The refusal of who sent no key, or one that is none here."""
    if _given_key(request):
        return _unauthorised(f"the server does not know this key; {instead}")
    return _unauthorised(needed)


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _forbidden(scope: str) -> ApiError:
    return ApiError(403, f"this key does not have the scope '{scope}'", code="missing_scope")
