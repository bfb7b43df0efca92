"""The routes that are passed on. There are no others: what is not followed is not passed on."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from starlette.responses import Response

from server.api.inference.answers import STREAMED, unless_gone
from server.api.models import SEPARATOR
from server.api.profiles import profile_names
from server.errors import ApiError
from server.proxy.asked import Asked, AskedChat, AskedCompletion
from server.proxy.call import Admitted, Call
from server.proxy.relay import PassedEvents, models

router = APIRouter(tags=["guarded"])


@router.post("/v1/completions", responses=STREAMED)
async def complete(asked: AskedCompletion, call: Admitted) -> Response:
    """Have each prompt continued."""
    return await _passed(asked, call, "/v1/completions")


@router.post("/v1/chat/completions", responses=STREAMED)
@router.post("/chat/completions", include_in_schema=False)
async def chat(asked: AskedChat, call: Admitted) -> Response:
    """Have the conversation answered."""
    return await _passed(asked, call, "/v1/chat/completions")


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def list_models(call: Admitted) -> dict[str, Any]:
    """The other server's models, and an alias of each for each profile."""
    found = await models(call.served.upstream, "/v1/models")
    if not isinstance(cards := found.get("data"), list):
        raise ApiError(502, "the upstream lists no models", code="upstream_error")
    listed = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
    aliases = [
        {**card, "id": f"{card['id']}{SEPARATOR}{name}"} for card in listed for name in profile_names(call.served)
    ]
    return {"object": "list", "data": [*listed, *aliases]}


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}")
async def show_model(name: str, call: Admitted) -> dict[str, Any]:
    """One model, or an alias of it. 404 for what is no name: a path could lead to any route of the other server."""
    model, _ = call.model(name)
    if not model or not all(part.strip(".") for part in model.split("/")):
        raise ApiError(404, f"model: '{name[:200]}' is not served here", param="model", code="model_not_found")
    card = await models(call.served.upstream, f"/v1/models/{quote(model, safe='/')}")
    if card.get("object") != "model":
        raise ApiError(502, "the upstream describes no model by this name", code="upstream_error")
    return {**card, "id": name}


async def _passed(asked: Asked, call: Call, path: str) -> Response:
    relay = call.submit(asked, path)
    if asked.streamed:
        return PassedEvents(relay, to_the_end=asked.wants_usage)
    raw = await unless_gone(call.request, relay.answer())
    if raw is None:
        return Response(status_code=499)
    return Response(raw, media_type="application/json", headers=relay.headers)
