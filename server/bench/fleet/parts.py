"""What a fleet is made of, as processes on loopback: an S3 server where there is one, nginx, servers and workers."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.request import Request, urlopen

from server.settings import HERE, PREFIX
from server.worker.process import without_settings
from unbind_core.errors import UnbindError

BUCKET = "unbind"
END_SECONDS = 60.0
PROXY = HERE.parent / "deploy/nginx/unbind.conf"


class Part:
    """One process that may be killed and started again."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name, self._command, self._environment = name, list(command), dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"

    def start(self) -> None:
        """Start it; its log goes on where it was."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=HERE.parent,
                env=without_settings(os.environ) | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, where it is there."""
        if self._process is not None and self.running:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Until it has ended. Raises subprocess.TimeoutExpired."""
        if self._process is not None:
            self._process.wait(END_SECONDS)

    def close(self) -> None:
        """End it in good order, or at once where that takes too long."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def told(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


def free_port() -> int:
    """A port of loopback that nobody has at the moment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def answers(port: int, path: str = "/ready", key: str = "") -> bool:
    """Whether 200 comes from there; with a ``key``, and a server that sees all it needs."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        return answer.status == 200 and (not key or json.loads(answer.read())["status"] == "ready")
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class S3Store:
    """A bucket of moto's server, in memory: it can be frozen, and is empty after a kill."""

    def __init__(self, python: str, folder: Path) -> None:
        self.port = free_port()
        arguments = [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.part = Part("store", arguments, {}, folder)
        self.part.start()
        wait_for(lambda: answers(self.port, "/moto-api/"), self.part, 60)
        with urlopen(Request(f"http://127.0.0.1:{self.port}/{BUCKET}", method="PUT")):
            pass

    def settings(self) -> dict[str, str]:
        """What processes of the service need to reach it."""
        return {
            "AWS_ACCESS_KEY_ID": "fleet",
            "AWS_SECRET_ACCESS_KEY": "fleet",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }

    def read(self, key: str) -> bytes:
        """An object under ``modules/``."""
        # moto looks for a signature and does not check it
        signed = "AWS4-HMAC-SHA256 Credential=fleet/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        address = f"http://127.0.0.1:{self.port}/{BUCKET}/modules/{key}"
        with urlopen(Request(address, headers={"Authorization": signed})) as answer:
            return bytes(answer.read())


def s3_python() -> str | None:
    """A Python that has moto's S3 server and fsspec's package for S3 beside this project: ``.venv-fleet``, which ``.ci/run`` makes,
    or this one. None where neither has.
    """
    for python in (HERE.parent / ".venv-fleet/bin/python", Path(sys.executable)):
        if python.exists():
            asked = [str(python), "-c", "import moto, flask, s3fs, torch"]
            if subprocess.run(asked, check=False, capture_output=True, cwd=HERE.parent).returncode == 0:
                return str(python)
    return None


def nginx(folder: Path, port: int, servers: Sequence[int]) -> Part:
    """A reverse proxy with the configuration that ships, on these ports. Raises UnbindError where there is no nginx."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise UnbindError("nginx is not installed (Debian: apt-get install nginx-light)")
    text = PROXY.read_text(encoding="utf-8").replace("listen 127.0.0.1:8000;", f"listen 127.0.0.1:{port};")
    for shipped, given in zip(("127.0.0.1:8001", "127.0.0.1:8002"), servers, strict=True):
        text = text.replace(shipped, f"127.0.0.1:{given}")
    (folder / "unbind.conf").write_text(text)
    temporary = "".join(
        f"{name}_temp_path {folder / name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""  # who else could read the folder
    (folder / "nginx.conf").write_text(
        f"{user}daemon off;\nworker_processes 1;\npid {folder / 'nginx.pid'};\nerror_log {folder / 'nginx.log'};\n"
        f"events {{ worker_connections 1024; }}\n"
        f"http {{\naccess_log off;\n{temporary}include {folder / 'unbind.conf'};\n}}\n"
    )
    return Part("nginx", [program, "-p", str(folder), "-c", str(folder / "nginx.conf")], {}, folder)


def environment(settings: Mapping[str, object], more: Mapping[str, str]) -> dict[str, str]:
    """Settings as a process of the service reads them, and what its libraries read."""
    return {PREFIX + name.upper(): str(value) for name, value in settings.items()} | dict(more)


def wait_for(what: Callable[[], bool], part: Part, seconds: float) -> None:
    """Until ``what()`` is so. Raises UnbindError with the end of the part's log."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline or not part.running:
            raise UnbindError(f"{part.name} is not ready: {part.told}")
        time.sleep(0.1)
