"""``create_guard``: the application that stands in front of another server."""

from __future__ import annotations

from fastapi import FastAPI

from server.app import assembled
from server.base_service import REFRESH_SECONDS, BaseService
from server.proxy.routes import router
from server.proxy.service import GuardService
from server.settings import Settings


def create_guard(settings: Settings, refresh_seconds: float = REFRESH_SECONDS) -> FastAPI:
    """The application; the other server need not be there yet. Raises UnbindError where the settings name none."""

    async def made() -> BaseService:
        return GuardService(settings, refresh_seconds)

    return assembled(settings, made, [router])
