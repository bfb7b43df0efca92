"""A real server over a real socket in this process: uvicorn on loopback in a thread, ended on leaving."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from server.app import create_app
from server.base_service import REFRESH_SECONDS
from server.engine.embedded.scheduler import Plan
from server.http.connections import ServerConfig
from server.service import Service
from server.settings import Settings
from tests.support.modules import build_module
from unbind_core.architecture import LoadedModel, load_model

ADMIN_KEY = "test-admin-key"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'function' %}{{ raise_exception('no functions here') }}{% endif %}"
    "# {{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
TOOL_TEMPLATE = (  # calls as Qwen's models write them
    "{% if tools %}# tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}# {{ message.role }}\n{{ message.content }}\n"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>\n'
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
TIMEOUT = 60.0


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until it is so, or fail."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def fail_at(server: Live, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """One decode step of the engine fails: of those from now on the one of this number, from 1."""
    runner, steps = server.service.engine.runner, itertools.count(1)
    forward = runner.forward

    def failing(plan: Plan) -> object:
        if plan.decode and next(steps) == step:
            raise RuntimeError("no more")
        return forward(plan)

    monkeypatch.setattr(runner, "forward", failing)


class Answer:
    """What came back: status, headers with names in lower case, the raw body."""

    def __init__(self, status: int, headers: Mapping[str, str], raw: bytes) -> None:
        self.status, self.headers, self.raw = status, headers, raw

    @property
    def body(self) -> Any:
        """The body as JSON."""
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        return dict(self.body["error"])

    @property
    def text(self) -> str:
        """The text of the first choice."""
        assert self.status == 200, self.raw
        return str(self.body["choices"][0]["text"])

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events, each parsed where it is JSON."""
        lines = [
            part.rpartition(b"data: ")[2] for part in self.raw.split(b"\n\n") if part
        ]  # behind a name, where it has one
        return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


class Live:
    """A running server and how to talk to it."""

    def __init__(self, server: uvicorn.Server, service: Service) -> None:
        self.service = service
        self.port: int = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def call(
        self,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One call; a body of bytes goes as it is."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            connection.request(method or ("GET" if raw is None else "POST"), path, raw, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def complete(self, **fields: Any) -> Answer:
        """A greedy completion of a few tokens, unless told otherwise."""
        headers, key = fields.pop("headers", None), fields.pop("key", None)
        path = fields.pop("path", "/v1/completions")
        given = {"prompt": "def add(first, second):\n", "max_tokens": 12, "temperature": 0, **fields}
        return self.call(path, given, headers=headers, key=key)

    def admin(self, path: str, body: Any = None, method: str | None = None) -> Answer:
        """An admin call."""
        return self.call("/admin/v1" + path, body, key=ADMIN_KEY, method=method)


@contextmanager
def serving(
    settings: Settings, loaded: LoadedModel, refresh_seconds: float = REFRESH_SECONDS, port: int = 0
) -> Iterator[Live]:
    """Serve a model under settings, at whatever port is free, or at ``port``."""
    with serving_app(create_app(settings, loaded, refresh_seconds), settings, port) as running:
        yield running


@contextmanager
def serving_app(app: FastAPI, settings: Settings, port: int = 0) -> Iterator[Live]:
    """Serve any application of ours, at whatever port is free, or at ``port``."""
    server = uvicorn.Server(ServerConfig(app, settings, host="127.0.0.1", port=port))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + TIMEOUT
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.005)
    try:
        yield Live(server, app.state.service)
    finally:
        server.should_exit = True
        thread.join(TIMEOUT)
        assert not thread.is_alive()


@contextmanager
def live(
    checkpoint: Path,
    folder: Path,
    modules: tuple[str, ...] = ("one", "two"),
    *,
    refresh_seconds: float = REFRESH_SECONDS,
    template: str = CHAT_TEMPLATE,
    port: int = 0,
    **settings: Any,
) -> Iterator[Live]:
    """Serve ``checkpoint`` with a chat template and the modules named, each at a layer of its own."""
    loaded = load_model(checkpoint)
    loaded.tokenizer.chat_template = template
    for number, name in enumerate(modules):
        made = build_module(loaded.identity, name, layer=number % 3, seed=number)
        made.save(folder / "modules" / f"{name}.safetensors")
    given = {
        "model": checkpoint,
        "model_name": "tiny",
        "modules_dir": folder / "modules",
        "data_dir": folder / "data",
        "worker": False,
        "admin_key": ADMIN_KEY,
        "max_model_len": 256,
        "max_slots": 4,
        "chunk_tokens": 64,
        **settings,
    }
    with serving(Settings(**given), loaded, refresh_seconds, port) as running:
        yield running
