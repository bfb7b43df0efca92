"""``/admin/v1``: keys, profiles and policies. Every route needs a key with the admin scope."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from server.api.admin.routes import Acting, IfMatch, IfNoneMatch, Served, admin_router, newest_access, refusals
from server.api.profiles import profile_names, profile_rules, scopes
from server.base_service import BaseService
from server.errors import ApiError
from server.registry.access import PROFILE_SCOPE, SCOPES, SERVER_SCOPE, Key, NoSuchKey, Scope, left_behind, revision
from server.rules import MAX_MODULES, ModuleName, ProfileName, Rules, Strengths, WhenOpen

router = admin_router(newest_access)
KEY_RULES = ("enforced", "allowed", "shadow", "when_open")  # what is said of a key when it is made


class KeyBody(BaseModel):
    """A key to be made."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    name: Annotated[StrictStr, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=len(SCOPES))] = ["inference"]
    enforced: Strengths = {}
    allowed: Annotated[list[ModuleName], Field(max_length=MAX_MODULES)] | None = None
    shadow: Annotated[list[ModuleName], Field(max_length=MAX_MODULES)] = []
    when_open: WhenOpen | None = None
    profile: ProfileName | None = None
    expires_at: Annotated[float, Field(gt=0, lt=1e11, description="seconds since the epoch, UTC")] | None = None
    expires_in: Annotated[float, Field(gt=0, lt=1e10, description="seconds from now")] | None = None
    requests_per_minute: (
        Annotated[float, Field(gt=0, le=1_000_000, description="each prompt of a call, times its answers, is one")]
        | None
    ) = None
    burst: Annotated[StrictInt, Field(ge=1, le=1_000_000, description="requests at once")] | None = None
    tokens_per_minute: (
        Annotated[
            float,
            Field(gt=0, le=1e12, description="of prompts and answers; what a call used is taken off when it is known"),
        ]
        | None
    ) = None


@router.post("/keys", status_code=201)
def create_key(body: KeyBody, served: Served, actor: Acting) -> dict[str, Any]:
    """Make a key; its text is in this answer and nowhere else."""
    now = time.time()
    if body.expires_at is not None and body.expires_in is not None:
        raise ApiError(400, "expires_in: goes without expires_at", param="expires_in", code="invalid_value")
    if (
        body.expires_at is not None and body.expires_at <= now
    ):  # useless, and from then on every request would need a key
        raise ApiError(
            400,
            "expires_at: lies in the past; give a later one, or expires_in",
            param="expires_at",
            code="invalid_value",
        )
    if body.burst is not None and body.requests_per_minute is None:
        raise ApiError(
            400, "burst: goes with requests_per_minute; give that too, or no burst", param="burst", code="invalid_value"
        )
    if body.profile is not None:
        _known_profile(served, body.profile)
    rules = Rules.model_validate(body.model_dump(include=set(KEY_RULES)))
    with refusals():
        key, text = served.access.create_key(
            body.name,
            actor,
            now,
            scopes=tuple(dict.fromkeys(body.scopes)),
            rules=rules,
            profile=body.profile,
            expires_at=now + body.expires_in if body.expires_in is not None else body.expires_at,
            per_minute=body.requests_per_minute,
            burst=body.burst,
            tokens_per_minute=body.tokens_per_minute,
        )
    return {**key_view(served, key, rules), "key": text}


@router.get("/keys")
async def list_keys(served: Served) -> dict[str, Any]:
    """Every key, revoked ones too, without their texts."""
    current = served.access.current
    keys = sorted(current.keys.values(), key=lambda key: key.created_at)
    return {"object": "list", "data": [key_view(served, key, current.of(f"key:{key.id}")) for key in keys]}


@router.delete("/keys/{key_id}")
def revoke_key(key_id: str, served: Served, actor: Acting) -> dict[str, Any]:
    """Make a key useless for good. ``warnings`` name the modules and guards that were enforced for it alone."""
    try:
        with refusals():
            key = served.access.revoke_key(key_id, actor, time.time())
            warnings = left_behind(key_id, served.access.bound_to(f"key:{key_id}"))
    except NoSuchKey as error:
        raise ApiError(404, str(error), param="key_id", code="key_not_found") from None
    return {**key_view(served, key, served.access.current.of(f"key:{key.id}")), "warnings": warnings}


def key_view(served: BaseService, key: Key, rules: Rules) -> dict[str, Any]:
    """A key as the API shows it."""
    return {
        "id": key.id,
        "object": "key",
        "name": key.name,
        "scopes": sorted(key.scopes),
        "profile": key.profile,
        **rules.model_dump(include={*KEY_RULES, "modules"}),
        "missing": _missing(served, rules),
        "requests_per_minute": key.per_minute,
        "burst": key.burst if key.per_minute is not None else None,
        "tokens_per_minute": key.tokens_per_minute,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }


@router.get("/profiles")
async def list_profiles(served: Served) -> dict[str, Any]:
    """Every profile and where it is defined."""
    return {"object": "list", "data": [_profile_view(served, name) for name in profile_names(served)]}


@router.get("/profiles/{name}")
async def show_profile(name: str, served: Served, response: Response) -> dict[str, Any]:
    """One profile."""
    _known_profile(served, name)
    response.headers["ETag"] = revision(profile_rules(served, name))
    return _profile_view(served, name)


@router.put("/profiles/{name}")
def put_profile(
    name: ProfileName,
    rules: Rules,
    served: Served,
    actor: Acting,
    response: Response,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> dict[str, Any]:
    """Define a profile, or define it anew; the next request runs under it.

    ``If-Match`` as for policies; with ``If-None-Match: *`` it is made only where there is none of that name.
    """
    _changeable(served, name)
    with refusals():
        served.access.put_rules(
            PROFILE_SCOPE + name, rules, actor, time.time(), if_match, new=if_none_match is not None
        )
    response.headers["ETag"] = revision(rules)
    return _profile_view(served, name)


@router.delete("/profiles/{name}")
def delete_profile(name: str, served: Served, actor: Acting) -> dict[str, Any]:
    """Forget a profile. A key that has it is refused until it exists again; one that a live module or guard is bound to stays."""
    _known_profile(served, name)
    _changeable(served, name)
    with refusals():
        served.access.delete_rules(PROFILE_SCOPE + name, actor, time.time())
    return {"name": name, "object": "profile", "deleted": True}


def _known_profile(served: BaseService, name: str) -> None:
    if name not in profile_names(served):
        known = ", ".join(profile_names(served)) or "none"
        raise ApiError(
            404, f"profile '{name[:80]}' does not exist; there are: {known}", param="profile", code="profile_not_found"
        )


def _changeable(served: BaseService, name: str) -> None:
    if name in served.settings.profiles:
        raise ApiError(
            409, f"profile '{name}' is defined in the settings; change it there", param="name", code="profile_fixed"
        )


def _profile_view(served: BaseService, name: str) -> dict[str, Any]:
    source: Literal["settings", "registry"] = "settings" if name in served.settings.profiles else "registry"
    return {"name": name, "object": "profile", "source": source, **profile_rules(served, name).model_dump()}


@router.get("/policies/{scope}")
async def show_policy(scope: str, served: Served, response: Response) -> dict[str, Any]:
    """The rules of ``global``, ``key:ID`` or ``profile:NAME``; those of the settings apply beside the global ones."""
    _known_scope(served, scope)
    rules = served.settings.profiles.get(scope.removeprefix(PROFILE_SCOPE)) if scope.startswith(PROFILE_SCOPE) else None
    rules = rules or served.access.current.of(scope)
    response.headers["ETag"] = revision(rules)
    return _policy_view(served, scope, rules)


@router.put("/policies/{scope}")
def put_policy(
    scope: str, rules: Rules, served: Served, actor: Acting, response: Response, if_match: IfMatch = None
) -> dict[str, Any]:
    """Write the rules of a scope, whole; the next request runs under them.

    With the ``ETag`` of what was seen in ``If-Match`` they are written only where nobody wrote others meanwhile.
    """
    _known_scope(served, scope)
    if scope.startswith(PROFILE_SCOPE):
        _changeable(served, scope.removeprefix(PROFILE_SCOPE))
    with refusals():
        served.access.put_rules(scope, rules, actor, time.time(), if_match)
    response.headers["ETag"] = revision(rules)
    return _policy_view(served, scope, rules)


def _policy_view(served: BaseService, scope: str, rules: Rules) -> dict[str, Any]:
    settings = {"enforced": served.settings.enforced, "when_open": served.settings.when_open}
    fixed = {"settings": settings} if scope == SERVER_SCOPE else {}
    return {"scope": scope, "object": "policy", **rules.model_dump(), **fixed, "missing": _missing(served, rules)}


def _missing(served: BaseService, rules: Rules) -> list[str]:
    """Modules that are demanded and not active: requests under the rules are refused."""
    return sorted({*rules.modules, *rules.enforced} - served.offer.applicable)


def _known_scope(served: BaseService, scope: str) -> None:
    if scope in scopes(served):
        return
    if scope.startswith(PROFILE_SCOPE):
        _known_profile(served, scope.removeprefix(PROFILE_SCOPE))
        return
    raise ApiError(
        404,
        f"scope '{scope[:80]}' does not exist; use global, key:ID or profile:NAME",
        param="scope",
        code="scope_not_found",
    )
