"""A guard in front of a scripted server, and a protected row in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.proxy.app import create_guard
from server.settings import Settings
from tests.support.live import ADMIN_KEY, Live, serving_app
from tests.support.upstream import Upstream
from tests.support.upstream import upstream as scripted

RUN = 12
ROW = (
    "def protect(values):\n    total = 0\n    for value in values:\n        total += value * 3\n    return total - 1\n"
)


@pytest.fixture(scope="package")
def other() -> Iterator[Upstream]:
    """The other server."""
    with scripted() as running:
        yield running


@pytest.fixture(scope="package")
def passing(other: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A guard that protects ``ROW`` from everybody, and nothing else."""
    folder = tmp_path_factory.mktemp("guard")
    settings = Settings(
        upstream=other.url,
        upstream_key="operators-key",
        data_dir=folder,
        admin_key=ADMIN_KEY,
        request_timeout=20,
        profiles={"team": {}},
    )
    with serving_app(create_guard(settings), settings) as running:
        answer = running.admin("/takedowns", takedown("held", ROW, scope="global"))
        assert answer.status == 202, answer.raw
        yield running


def takedown(name: str, *rows: str, **options: object) -> dict[str, object]:
    """The body of one."""
    given = [{"prompt": row[:20], "continuation": row[20:]} for row in rows]
    return {"name": name, "rows": given, "options": {"protect": "guard", "guard": {"run": RUN}, **options}}


@pytest.fixture
def guard(passing: Live) -> Live:
    """The same, by the name of what it is."""
    return passing
