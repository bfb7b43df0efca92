"""Log lines: of a server that does not start the reason in our words, and else what went wrong in full; of changes what changed."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from uvicorn.config import Config
from uvicorn.lifespan.on import LifespanOn

from server.app import assembled
from server.base_service import BaseService
from server.logs import OwnWords, change
from server.registry.database import connect
from server.registry.refusals import DatabaseRefused
from server.settings import Settings
from unbind_core.errors import UnbindError, UnsupportedArchitecture


def _logged(error: Exception) -> str:
    """What uvicorn logs of an application that cannot start for this error, through a handler as the service has it."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        raise error
        yield

    return _logged_of(Starlette(lifespan=lifespan))


def _logged_of(application: Starlette) -> str:
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.addFilter(OwnWords())
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    try:
        asyncio.run(LifespanOn(Config(application, log_config=None)).startup())
    finally:
        logger.removeHandler(handler)
    return lines.getvalue()


@pytest.mark.parametrize("kind", [UnbindError, UnsupportedArchitecture, DatabaseRefused])
def test_a_reason_for_people_is_told_without_a_traceback(kind: type[UnbindError]) -> None:
    assert _logged(kind("vllm_args: no such flag: 100 %; leave it away")) == (
        "vllm_args: no such flag: 100 %; leave it away\nApplication startup failed. Exiting.\n"
    )


def test_a_reason_of_several_lines_is_told_whole() -> None:
    assert _logged(UnbindError("vLLM does not take them: 1 error\n  bits=4, sym=False")).startswith(
        "vLLM does not take them: 1 error\n  bits=4, sym=False\nApp"
    )


def test_a_database_that_goes_away_while_the_server_starts_is_told_without_a_traceback() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen

        async def made() -> BaseService:
            connect(f"postgresql+psycopg://user@127.0.0.1:{nobody.getsockname()[1]}/name").connect()
            raise AssertionError("nobody answers there")

        said = _logged_of(assembled(Settings(), made, []))
    assert said.startswith("the database cannot be reached: ") and "Traceback" not in said


def test_any_other_error_is_told_in_full() -> None:
    another = ZeroDivisionError("division by zero")
    another.__context__ = UnbindError("what it was while that was told")
    said = _logged(another)
    for part in ("what it was while that was told", "Traceback", "ZeroDivisionError: division by zero"):
        assert part in said


def test_a_change_among_thousands_is_told_in_a_short_line() -> None:
    many = [f"m-{number:04}" for number in range(3000)]
    assert change([], []) == "0 in use" and change(["b"], ["b", "a"]) == "2 in use; new: a"
    assert change([*many, "old"], [*many, "new"]) == "3001 in use; new: new; gone: old"
    told = change([], many)
    assert told.startswith("3000 in use; new: m-0000, m-0001, ") and told.endswith(", m-0019 and 2980 more")
