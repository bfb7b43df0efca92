"""``create_app``: routes, middleware and error translation put together; the lifespan owns everything that runs.

``assembled`` does so for any server of this kind, whoever makes its answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from server import errors
from server.api import console, health, models
from server.api.admin import access, audit, evidence, guards, jobs, modules, takedowns
from server.api.admission import KeyFirst, OwnName
from server.api.characters import whole_characters
from server.api.inference import chat, completions, fim, infill, messages, native, responses, tokens
from server.api.middleware import REQUEST_ID, BodyLimit, ProfilePath, RequestLog, TimeLimit
from server.base_service import REFRESH_SECONDS, BaseService
from server.policy import HEADER
from server.probing.rounds import Rounds
from server.registry.refusals import AWAY, unanswered
from server.service import Service, load_served
from server.settings import Settings
from unbind_core.architecture import LoadedModel


def create_app(
    settings: Settings, loaded: LoadedModel | None = None, refresh_seconds: float = REFRESH_SECONDS
) -> FastAPI:
    """The application; the model is loaded when it starts unless given, and everything is put away when it ends."""

    async def made() -> BaseService:
        model = loaded if loaded is not None else await asyncio.to_thread(load_served, settings)
        service = Service(settings, model, refresh_seconds)
        if settings.canary_seconds:
            service.beside(Rounds(service).run)
        return service

    inference = (completions, chat, responses, messages, fim, infill, native, tokens, models)
    return assembled(settings, made, [*(part.router for part in inference), console.router])


def assembled(
    settings: Settings, made: Callable[[], Awaitable[BaseService]], answering: Iterable[APIRouter]
) -> FastAPI:
    """An application with the routes that answer, and all that every server has beside them; ``made`` makes what it holds."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with _in_words():
            held = await made()
        app.state.service = held
        if app.state.given_up:
            held.give_up()
        try:
            with _in_words():
                await held.start()
            yield
        finally:
            await held.stop()

    app = FastAPI(
        title="Unbind",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # shown to keys alone, once there is one
        redirect_slashes=False,  # which would lose the profile of the path, and go where the client's Host header says
        dependencies=[Depends(whole_characters)],
    )
    app.state.given_up = False  # whether a signal came before there was anything to end
    errors.install(app)
    administration = (takedowns, jobs, modules, guards, access, audit, evidence)
    for router in (*answering, *(part.router for part in (*administration, health))):
        app.include_router(router)
    app.add_middleware(TimeLimit, seconds=settings.request_timeout)
    app.add_middleware(BodyLimit, settings=settings)
    app.add_middleware(KeyFirst)
    app.add_middleware(ProfilePath)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER, REQUEST_ID, "request-id", "Retry-After", "x-should-retry"],
        )
    app.add_middleware(OwnName, owner=app)
    app.add_middleware(RequestLog, owner=app)
    return app


@contextmanager
def _in_words() -> Iterator[None]:
    """A database that goes away while the server starts keeps it from starting. Raises DatabaseRefused."""
    try:
        yield
    except AWAY as error:
        raise unanswered(error) from None
