"""What a port answers while the model behind it is loaded."""

from __future__ import annotations

import json
import socket
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from server.cli.loading import bind, not_ready
from server.keys import check_keys
from server.settings import Settings
from unbind_core.errors import UnbindError


def _call(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, Any, str | None]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read() or b"null"), answer.getheader("Retry-After")
    connection.close()
    return found


def test_a_server_that_loads_is_alive_and_not_ready_and_leaves_its_port_to_the_next() -> None:
    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    with not_ready(bound, Settings()):
        assert _call(port, "GET", "/health") == (200, {"status": "ok"}, None)
        for method, path, body in (
            ("GET", "/ready", None),
            ("GET", "/", None),
            ("POST", "/v1/completions", b"x" * 500_000),
        ):
            status, told, again = _call(port, method, path, body)
            assert (status, told["error"]["code"], again) == (503, "not_ready", "2")
        assert _call(port, "HEAD", "/ready")[0] == 503
    later: list[int] = []
    caller = threading.Thread(target=lambda: later.append(_call(port, "GET", "/health")[0]))
    caller.start()  # finds nobody, and is not refused
    caller.join(0.3)
    assert not later
    with not_ready(bound, Settings()):
        caller.join(20)
    assert later == [200]
    bound.close()


def test_an_address_that_cannot_be_had_is_named_with_the_remedy() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnbindError, match=f"127.0.0.1:{port} .*in use.*choose another"):
            bind("127.0.0.1", port)
    with pytest.raises(UnbindError, match="choose another --host"):
        bind("nowhere.invalid", 0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("evidence.key", r"evidence\.key: holds no Ed25519 key in base64; restore it from a backup"),
        ("guard.key", r"guard\.key: holds no key of 32 bytes; restore it"),
    ],
)
def test_a_key_that_is_none_is_told_of_before_anything_starts(tmp_path: Path, name: str, says: str) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    check_keys(settings)
    assert not (settings.data_dir / "evidence.key").exists()
    (settings.data_dir / name).write_text("bm8ga2V5\n")
    with pytest.raises(UnbindError, match=says):
        check_keys(settings)


@pytest.mark.parametrize("name", ["admin.key", "guard.key", "evidence.key"])
def test_a_key_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    settings = Settings(data_dir=tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(UnbindError, match=rf"data_dir: .*{name}: Is a directory; the account that serves must own"):
        check_keys(settings)
