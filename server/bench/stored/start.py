"""A real server started on thousands of stored takedowns: seconds, memory, one more of them, and one answer.

Behind ``unbind bench stored``. The same server without any of them is measured beside it, and so is one thread that reads module
files and does nothing else.
"""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from server.bench.server import Served, served
from server.bench.stored.place import evicted, filled
from server.registry.objects import ObjectStore
from server.registry.registry import open_registry
from server.registry.tables import Kind
from server.settings import Settings
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback

READ_ALONE = 300  # files
IDLE_SECONDS = 10.0
NEW = 8  # tokens
ANSWER_SECONDS = 600.0
_TICKS = 100  # a second, of /proc
_KEY = "bench-stored"


def stored_figures(
    settings: Mapping[str, object],
    *,
    modules: int,
    in_force: int,
    guards: int,
    repeats: int,
    folder: Path | None,
    progress: ProgressCallback,
    idle: float = IDLE_SECONDS,
) -> dict[str, Any]:
    """``starts``: by start, ``seconds`` to ready and the processor's, memory, what idling takes of a core, ``answer_seconds`` of
    the first answers, and the last of them ``one_more_seconds``; the first is ``from_disk``, its files out of the system's memory.
    ``bare``: the same with an empty registry. ``stored_...``: what is more in ``starts``, by medians without the one from disk.
    ``read_alone_ms``: one module file, by one thread that does nothing else. Raises UnbindError.
    """
    with ExitStack() as ends:
        where = folder or Path(ends.enter_context(tempfile.TemporaryDirectory()))
        full, empty, shipped = (where / name for name in ("full", "empty", "shipped"))
        shipped.mkdir(parents=True, exist_ok=True)
        common = {"modules_dir": shipped, "worker": False, "admin_key": _KEY, "threads": torch.get_num_threads()}
        given = {**common, **settings}
        own = Settings.model_validate({**given, "data_dir": full})
        one_more = filled(own, modules, in_force, guards, progress)
        objects = ObjectStore(own.published_store)
        bare, starts = [], []
        for repeat in range(repeats):
            bare.append(_start(given, empty, None, idle))
            progress(Progress("starts", 2 * repeat + 1, 2 * repeats))
            if not repeat and objects.folder is not None:
                evicted(objects.folder / "objects")
            starts.append(
                _start(given, full, one_more if repeat == repeats - 1 else None, idle) | {"from_disk": not repeat}
            )
            progress(Progress("starts", 2 * repeat + 2, 2 * repeats))
        alone = _read_alone(own, objects)
    warm = [start for start in starts if not start["from_disk"]] or starts

    def more(figure: str) -> float:
        return float(statistics.median(one[figure] for one in warm) - statistics.median(one[figure] for one in bare))

    return {
        "modules": modules,
        "in_force": in_force,
        "guards": guards,
        "read_alone_ms": alone,
        "stored_seconds": more("seconds"),
        "stored_processor_seconds": more("processor_seconds"),
        "bare": bare,
        "starts": starts,
    }


def _start(given: Mapping[str, object], folder: Path, one_more: str | None, idle: float) -> dict[str, Any]:
    """One start and what follows; ``one_more``: a module that is activated."""
    began = time.perf_counter()
    with served(given, folder) as server:
        found: dict[str, Any] = {"seconds": time.perf_counter() - began}
        found["processor_seconds"] = _processor_seconds(server)
        found["loaded"] = len(_asked(server, "/ready")[0]["modules"])
        found["resident_bytes"] = _resident(server)
        before = _processor_seconds(server)
        time.sleep(idle)
        found["idle_share"] = (_processor_seconds(server) - before) / idle
        answers = [_asked(server, "/v1/completions", _COMPLETION) for _ in range(3)]
        found["answer_seconds"] = [seconds for _, seconds, _ in answers]
        found["answer_head_bytes"] = answers[0][2]
        found["resident_after_bytes"] = _resident(server)
        if one_more is not None:
            path = f"/admin/v1/modules/{one_more}"
            changed, found["one_more_seconds"], _ = _asked(server, f"{path}/activate?override=true", {})
            if not changed["loaded"]:
                raise UnbindError(f"the module '{one_more}' was activated and is not loaded")
            found["answer_after_seconds"] = [_asked(server, "/v1/completions", _COMPLETION)[1] for _ in range(2)]
            found["one_less_seconds"] = _asked(server, f"{path}/suspend", {})[1]
    return found


_COMPLETION = {"prompt": "def main(", "max_tokens": NEW, "temperature": 0}


def _asked(server: Served, path: str, body: dict[str, Any] | None = None) -> tuple[dict[str, Any], float, int]:
    """The answer, the seconds it took and the bytes of its head, which may be longer than Python's own client takes.

    Raises UnbindError where it is none of success.
    """
    parts = urlsplit(server.url)
    data = json.dumps(body).encode() if body is not None else b""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {_KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nIf-Match: *\r\nConnection: close\r\n\r\n"
    began = time.perf_counter()
    with socket.create_connection((str(parts.hostname), int(parts.port or 80)), ANSWER_SECONDS) as connection:
        connection.sendall(head.encode() + data)
        said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    seconds = time.perf_counter() - began
    answer_head, _, text = said.partition(b"\r\n\r\n")
    if not answer_head.startswith(b"HTTP/1.1 20"):
        raise UnbindError(f"{path}: {answer_head[:100].decode(errors='replace')} {text[:500].decode(errors='replace')}")
    return dict(json.loads(text)), seconds, len(answer_head)


def _processor_seconds(server: Served) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident(server: Served) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="utf-8")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


def _read_alone(settings: Settings, objects: ObjectStore) -> float:
    """Milliseconds to read one module file as a server does, by one thread: the median of three rounds over some of them."""
    registry = open_registry(settings)
    records = [record for record in registry.modules.versions() if record["kind"] == Kind.MODULE][:READ_ALONE]
    registry.close()
    rounds = []
    for _ in range(3):
        began = time.perf_counter()
        for record in records:
            data = objects.get(record["file"], record["digest"])
            UnbindModule.from_bytes(data, record["file"], record["digest"])
        rounds.append(1e3 * (time.perf_counter() - began) / len(records))
    return statistics.median(rounds)
