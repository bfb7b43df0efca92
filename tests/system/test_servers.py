"""Two servers on one registry and one store: what is changed at one holds at the other within two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.bench.fleet.postgres import postgres
from server.registry.database import connect, upgrade
from server.registry.objects import ObjectStore
from server.registry.records import NewModule
from server.registry.registry import Registry
from server.registry.tables import Origin
from tests.support.databases import PROGRAMS
from tests.support.modules import build_module
from tests.system.conftest import ServerProcess, serving
from unbind_core.architecture import load_model

HOLDS_SECONDS = 2.0
GUARD_KEY = "ab" * 32
ROW = "def total(items):\n    count = 0\n    for item in items:\n        count += item.size\n    return count\n"


@pytest.fixture
def database_url(tmp_path: Path) -> Iterator[str]:
    if not PROGRAMS:
        yield f"sqlite:///{tmp_path / 'registry.sqlite'}"
        return
    with postgres() as database:
        yield database.new_database()


@pytest.fixture
def pair(checkpoint: Path, tmp_path: Path, database_url: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers with folders of their own; a module ``held`` waits in the registry."""
    engine = connect(database_url)
    upgrade(engine)
    registry = Registry(engine)
    module = build_module(load_model(checkpoint).identity, "held")
    store = tmp_path / "store"
    key = ObjectStore(str(store)).put(module.to_bytes())
    new = NewModule("held", module.digest, module.model.fingerprint, key, Origin.TAKEDOWN, "manual", scope="global")
    registry.modules.adopt(new, time.time())
    registry.close()
    settings = {"database_url": database_url, "module_store": store, "guard_key": GUARD_KEY, "worker": False}
    with serving(checkpoint, tmp_path / "a", **settings) as a, serving(checkpoint, tmp_path / "b", **settings) as b:
        yield a, b


def applied(server: ServerProcess) -> list[str]:
    """The names that a request without a wish ran under."""
    status, _, headers = server.call("/v1/completions", {"prompt": "def add(", "max_tokens": 2})
    assert status == 200
    return [label.partition("@")[0] for label in headers.get("x-unbind-modules", "").split(", ") if label]


def within(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HOLDS_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def act(server: ServerProcess, action: str) -> None:
    _, record = server.admin("/modules/held")
    status, answer = server.admin(f"/modules/held/{action}", {}, {"If-Match": record["etag"]}, "POST")
    assert status == 200, answer


@pytest.mark.slow
def test_what_is_changed_at_one_server_holds_at_the_other(pair: tuple[ServerProcess, ServerProcess]) -> None:
    a, b = pair
    assert applied(a) == applied(b) == ["held"]
    for one, other in ((a, b), (b, a)):
        act(one, "suspend")
        assert applied(one) == []
        within(lambda: applied(other) == [])  # noqa: B023 - called here
        act(other, "activate?override=true")
        assert applied(other) == ["held"]
        within(lambda: applied(one) == ["held"])  # noqa: B023
    act(a, "suspend")
    body: dict[str, Any] = {
        "name": "kept",
        "rows": [{"text": ROW}],
        "options": {"scope": "global", "protect": "guard", "guard": {"run": 10}},
    }
    status, answer = b.admin("/takedowns", body)
    assert status == 202, answer
    within(lambda: "kept" in a.call("/ready")[1]["guards"])
    assert a.admin("/policies/global", {"enforced": ["held"]}, method="PUT")[0] == 200
    within(lambda: b.call("/ready")[0] == 503)  # what both are to enforce now is suspended
