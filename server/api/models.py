"""``/v1/models``: the one model that is served."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from server.errors import ApiError
from server.service import Service, service

router = APIRouter(prefix="/v1", tags=["models"])
Served = Annotated[Service, Depends(service)]


def check_model(served: Service, name: str | None) -> None:
    """Raise 404 where a request names a model that is not served."""
    if name is not None and name != served.settings.served_name:
        raise ApiError(
            404,
            f"model: '{name[:200]}' is not served here; use '{served.settings.served_name}'",
            param="model",
            code="model_not_found",
        )


def _card(served: Service) -> dict[str, Any]:
    return {
        "id": served.settings.served_name,
        "object": "model",
        "created": 0,
        "owned_by": "unbind",
        "max_model_len": served.settings.max_model_len,
        "unbind": {
            "fingerprint": served.loaded.identity.fingerprint,
            "modules": [entry.label for entry in served.engine.modules.current.values()],
        },
    }


@router.get("/models")
async def list_models(served: Served) -> dict[str, Any]:
    """The list the official client reads."""
    return {"object": "list", "data": [_card(served)]}


@router.get("/models/{name:path}")
async def show_model(name: str, served: Served) -> dict[str, Any]:
    """One model. 404 for any other name."""
    check_model(served, name)
    return _card(served)
