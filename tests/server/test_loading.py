"""What a port answers while the model behind it is loaded."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn
from fastapi import FastAPI

from server.bench.fleet.parts import free_port
from server.cli.starting.announcing import AnnouncingServer, run
from server.cli.starting.loading import bind, not_ready
from server.keys import check_keys
from server.settings import Settings
from tests.support.programs import ENVIRONMENT
from tests.support.repository import ROOT
from unbind_core.errors import UnbindError

SLOW = """
import asyncio, sys
from pathlib import Path
from server.cli import main
from server.service import Service

folder, opened = Path(sys.argv.pop(1)), Service._open


async def waits(self):
    (folder / "starts").touch()
    while not (folder / "go").exists():
        await asyncio.sleep(0.02)
    await opened(self)


Service._open = waits
main()
"""


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


def test_who_has_connected_is_answered_before_the_port_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.cli.starting.loading.ASKED_SECONDS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as bound, ExitStack() as loading:
        loading.enter_context(not_ready(bound, Settings()))
        with socket.create_connection(bound.getsockname()) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n")
            assert _call(bound.getsockname()[1], "GET", "/health")[0] == 200  # so that the one before has been accepted
            ends = threading.Thread(target=loading.close)
            ends.start()
            ends.join(0.3)
            client.sendall(b"Host: here\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        ends.join(20)
        assert not ends.is_alive()


def test_a_server_whose_engine_is_still_starting_is_alive_and_not_ready(checkpoint: Path, tmp_path: Path) -> None:
    port = free_port()
    options = {"model": checkpoint, "data-dir": tmp_path / "data", "modules-dir": tmp_path, "port": port}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-c", SLOW, str(tmp_path), "serve", "--no-worker", "--json", *flags]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as serving:
        try:
            while not (tmp_path / "starts").exists():
                assert serving.poll() is None
                time.sleep(0.02)
            assert _call(port, "GET", "/health") == (200, {"status": "ok"}, None)
            status, told, again = _call(port, "POST", "/v1/completions", b'{"prompt": "a"}')
            assert (status, told["error"]["code"], again) == (503, "not_ready", "2")
            (tmp_path / "go").touch()
            while (found := _call(port, "GET", "/ready"))[0] != 200:
                assert found[1]["error"]["code"] == "not_ready" and serving.poll() is None
                time.sleep(0.02)
            serving.send_signal(signal.SIGINT)
            assert json.loads(serving.communicate(timeout=60)[0])["model"] == checkpoint.name
        finally:
            serving.kill()
    assert serving.returncode == 0


@pytest.mark.parametrize("which", ["installed", "before 0.50"])
def test_a_start_that_fails_ends_the_command_with_3(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    async def startup(server: uvicorn.Server, sockets: Any = None) -> None:
        """As uvicorn 0.49 has it."""
        await server.lifespan.startup()
        server.should_exit |= server.lifespan.should_exit

    @asynccontextmanager
    async def fails(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("the model is not what it was")
        yield

    if which != "installed":
        monkeypatch.setattr(uvicorn.Server, "startup", startup)
    app, before = FastAPI(lifespan=fails), signal.getsignal(signal.SIGHUP)
    app.state.given_up = False
    with bind("127.0.0.1", 0) as listening, pytest.raises((SystemExit, typer.Exit)) as ended:
        run(AnnouncingServer(app, Settings(), as_json=True, announce=print), listening)
    signal.signal(signal.SIGHUP, before)
    assert getattr(ended.value, "exit_code", None) == 3 or getattr(ended.value, "code", None) == 3


def test_the_collector_of_garbage_passes_over_what_a_started_server_has() -> None:
    """A body of 900,000 empty lists had it go through all of it for seconds, and nothing else went on."""
    held = [[1]]
    application: Any = AnnouncingServer(FastAPI(), Settings(), as_json=True, announce=print).config.app
    told = list[tuple[str, bool]]()

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.shutdown" if told else "lifespan.startup"}

    async def send(message: dict[str, str]) -> None:
        told.append((message["type"], any(one is held for one in gc.get_objects())))

    assert any(one is held for one in gc.get_objects())
    asyncio.run(application({"type": "lifespan", "state": {}}, receive, send))
    assert told[0] == ("lifespan.startup.complete", False)


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


@pytest.mark.parametrize(("given", "used"), [(0, 2), (3, 3)])
def test_a_server_computes_with_the_threads_that_its_group_has_processors_for(
    tmp_path: Path, given: int, used: int
) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    program = f"""
import torch
from pathlib import Path
from server import service
from server.settings import Settings
from unbind_core.running.allowed import allowed_processors

service.allowed_processors = lambda: allowed_processors(Path({str(tmp_path)!r}), Path({str(tmp_path)!r}))
torch.set_num_threads(4)
service.load_served(Settings(threads={given}))
print(torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(used)], done.stderr
