"""What commands that ask a running server share: its address and admin key, one call, and errors as the server says them."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

import typer

from server.settings import PREFIX
from unbind_core import UnbindError

Url = Annotated[str, typer.Option("--url", help="Address of the server.")]
Key = Annotated[
    str | None, typer.Option("--key", help="Admin key; else UNBIND_ADMIN_KEY, else the one kept in the data folder.")
]
LOCAL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 120


class Client:
    """Calls to ``/admin/v1`` of one server."""

    def __init__(self, url: str, key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UnbindError(f"--url: '{url}' is not an address such as {LOCAL}")
        self._base = url.rstrip("/") + "/admin/v1"
        self._headers = {"Authorization": f"Bearer {key or _kept_key()}"}

    def call(
        self, path: str, body: Any = None, *, method: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The parsed answer. Raises UnbindError with what the server says."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        with self._open(path, data, method, {"Content-Type": "application/json", **(headers or {})}) as answer:
            return json.loads(answer.read())

    def upload(self, path: str, fields: Mapping[str, str], file: Path, headers: Mapping[str, str]) -> Any:
        """A file with other fields, as a form."""
        boundary = uuid.uuid4().hex
        parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
                 for name, value in fields.items()]  # fmt: skip
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{quote(file.name)}"\r\n\r\n'
        body = b"".join([*parts, head.encode(), file.read_bytes(), f"\r\n--{boundary}--\r\n".encode()])
        return self.call(path, body, headers={**headers, "Content-Type": f"multipart/form-data; boundary={boundary}"})

    def events(self, path: str) -> Iterator[dict[str, Any]]:
        """What a stream of server-sent events tells, until it ends."""
        with self._open(path, None, None, {}) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    def _open(self, path: str, data: bytes | None, method: str | None, headers: Mapping[str, str]) -> Any:
        request = Request(self._base + path, data=data, method=method, headers={**headers, **self._headers})  # noqa: S310
        try:
            return urlopen(request, timeout=TIMEOUT_SECONDS)  # noqa: S310 - the scheme was checked
        except HTTPError as error:
            with error:
                raise UnbindError(f"{_message(error.read())} ({error.code})") from None
        except (URLError, TimeoutError) as error:
            reason = getattr(error, "reason", error)
            raise UnbindError(f"{self._base} does not answer ({reason}); is `unbind serve` running there?") from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def _kept_key() -> str:
    if key := os.environ.get(f"{PREFIX}ADMIN_KEY"):
        return key
    kept = Path(os.environ.get(f"{PREFIX}DATA_DIR", ".unbind")) / "admin.key"
    path = Path(os.environ.get(f"{PREFIX}ADMIN_KEY_FILE") or kept)
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        raise UnbindError(f"no admin key: give --key, set {PREFIX}ADMIN_KEY, or run beside {path}") from None
