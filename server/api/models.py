"""``/v1/models``: the one model that is served, and an alias ``MODEL~PROFILE`` for each profile."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from server.api.caller import inference
from server.api.profiles import profile_names
from server.errors import ApiError
from server.service import Service, service

router = APIRouter(tags=["models"], dependencies=[Depends(inference)])
Served = Annotated[Service, Depends(service)]
SEPARATOR = "~"


def check_model(served: Service, name: str | None) -> str | None:
    """The profile that a model's name chooses, None for none. Raises ApiError 404 where the model is not served."""
    own = served.settings.served_name
    if name is None or name == own:
        return None
    model, separator, profile = name.rpartition(SEPARATOR)
    if separator and model == own and profile in profile_names(served):
        return profile
    aliases = ", ".join(f"'{alias}'" for alias in [own, *_aliases(served)])
    raise ApiError(
        404, f"model: '{name[:200]}' is not served here; there are: {aliases}", param="model", code="model_not_found"
    )


def _aliases(served: Service) -> list[str]:
    return [f"{served.settings.served_name}{SEPARATOR}{profile}" for profile in profile_names(served)]


def _card(served: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "unbind",
        "max_model_len": served.settings.max_model_len,
        "unbind": {
            "fingerprint": served.loaded.identity.fingerprint,
            "profile": check_model(served, name),
            "modules": [entry.label for entry in served.engine.modules.current.values()],
        },
    }


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def list_models(served: Served) -> dict[str, Any]:
    """The list the official client reads."""
    names = [served.settings.served_name, *_aliases(served)]
    return {"object": "list", "data": [_card(served, name) for name in names]}


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}")
async def show_model(name: str, served: Served) -> dict[str, Any]:
    """One model or alias. 404 for any other name."""
    check_model(served, name)
    return _card(served, name)
