"""What commands that ask a running server share: its address and admin key, one call, and errors as the server says them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx2
import typer

from server.exposure import is_loopback
from server.settings import PREFIX
from server.sources import at_home
from unbind_core import UnbindError

Url = Annotated[str, typer.Option("--url", envvar="UNBIND_URL", help="Address of the server.")]
Key = Annotated[
    str | None, typer.Option("--key", help="Admin key; else UNBIND_ADMIN_KEY, else the one kept in the data folder.")
]
LOCAL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 120


def address(kind: str, named: str, *rest: str) -> str:
    """Where a record stands, whatever characters its id or name has. Raises UnbindError where it is none."""
    if not named.strip(".") or "/" in named:  # which ends a part of an address, however it is written
        raise UnbindError(f"'{named}' is no id or name of {kind}; their lists show what there is")
    return "/".join(("", kind, quote(named, safe=""), *rest))


class Away(UnbindError):
    """Nobody answers, or whoever does says that the server does not: it may be back soon."""


class Client:
    """Calls to ``/admin/v1`` of one server."""

    def __init__(self, url: str, key: str | None) -> None:
        wrong = UnbindError(f"--url: '{url}' is not an address such as {LOCAL}")
        if not url.startswith(("http://", "https://")):
            raise wrong
        self._base = url.rstrip("/") + "/admin/v1"
        try:
            host = httpx2.URL(url).host
        except httpx2.InvalidURL:
            raise wrong from None
        if not host:
            raise wrong
        # No proxy that the environment names reaches this machine's loopback, nor is one to be sent the admin key.
        self._proxied = not is_loopback(host)
        self._key = {"Authorization": f"Bearer {key or _kept_key()}"}

    def call(
        self, path: str, body: Any = None, *, method: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The parsed answer. Raises UnbindError with what the server says."""
        content = None if body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **(headers or {})}
        method = method or ("GET" if body is None else "POST")
        with self._asked(path, method, given, content=content) as answer:
            return self._parsed(answer)

    def whole(self, path: str) -> Any:
        """The answer of a list that comes in pages, all of its ``data`` in one; ``path`` has a query. Raises UnbindError."""
        answer = self.call(path)
        while answer.pop("has_more", False):
            more = self.call(f"{path}&after={answer['data'][-1]['id']}")
            answer = more | {"data": answer["data"] + more["data"]}
        return answer

    def upload(self, path: str, fields: Mapping[str, str], file: Path, headers: Mapping[str, str]) -> Any:
        """A file with other fields, as a form."""
        name = os.fsencode(file.name).decode(errors="replace")  # a file system takes names that are no text
        with (
            file.open("rb") as data,
            self._asked(path, "POST", headers, data=fields, files={"file": (name, data)}) as answer,
        ):
            return self._parsed(answer)

    def events(self, path: str) -> Iterator[dict[str, Any]]:
        """What a stream of server-sent events tells, until it ends or breaks off: the last event says which. Raises UnbindError;
        Away where the server does not answer.
        """
        with self._asked(path, "GET", {}) as answer, suppress(httpx2.TransportError):
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise self._foreign(answer)
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])

    def _parsed(self, answer: httpx2.Response) -> Any:
        """What an answer holds. Raises UnbindError for what no server of ours gives, as a page to sign in at."""
        try:
            told = json.loads(answer.read())
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise self._foreign(answer)
        return told

    def _foreign(self, answer: httpx2.Response) -> UnbindError:
        kind = answer.headers.get("content-type", "of no type")
        return UnbindError(
            f"--url: {self._base} is answered by something else than an Unbind server ({answer.status_code}, {kind}); "
            f"give the address that `unbind serve` tells of, such as {LOCAL}"
        )

    @contextmanager
    def _asked(self, path: str, method: str, headers: Mapping[str, str], **body: Any) -> Iterator[httpx2.Response]:
        """The answer, whose body is still to be read, and may fail to come."""
        given: dict[str, Any] = {"headers": _encoded({**headers, **self._key}), "timeout": TIMEOUT_SECONDS, **body}
        given["trust_env"] = self._proxied
        try:
            # Not followed: a POST that is sent on becomes a GET, and no other address is to be sent the key.
            with httpx2.stream(method, self._base + path, follow_redirects=False, **given) as answer:
                if answer.has_redirect_location:
                    there = str(answer.url.join(answer.headers["location"])).partition("/admin/v1")[0]
                    raise UnbindError(
                        f"--url: {self._base} sends on to {there} ({answer.status_code}), which is not followed; give that address"
                    )
                if not answer.is_success:
                    kind = Away if answer.status_code in (502, 503, 504) else UnbindError
                    raise kind(f"{_message(answer.read()) or answer.reason_phrase} ({answer.status_code})")
                yield answer
        except httpx2.RequestError as error:
            reason = str(error) or type(error).__name__
            raise Away(f"{self._base} does not answer ({reason}); is `unbind serve` running there?") from None


def _encoded(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """Headers as the server reads them. Raises UnbindError naming the one that cannot be sent, not its value: it may be a key."""
    encoded = {}
    for name, value in headers.items():
        if value != value.strip() or any(ord(character) < ord(" ") or character == "\x7f" for character in value):
            raise UnbindError(
                f"{name}: holds the end of a line or another control character, or ends in a blank, which no header can; "
                "give it without"
            )
        try:
            encoded[name.encode()] = value.encode("latin-1")
        except UnicodeEncodeError:
            raise UnbindError(
                f"{name}: only characters of Latin-1 can be sent in a header; give another value"
            ) from None
    return encoded


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def _kept_key() -> str:
    if key := os.environ.get(f"{PREFIX}ADMIN_KEY"):
        return key
    kept = f"{os.environ.get(f'{PREFIX}DATA_DIR') or '.unbind'}/admin.key"
    path = Path(at_home(os.environ.get(f"{PREFIX}ADMIN_KEY_FILE") or kept))
    try:
        key = path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UnbindError(f"no admin key: '{path}' is not text; write the key into it, or give --key") from None
    except OSError as error:
        raise UnbindError(
            f"no admin key: '{path}' cannot be read ({error.strerror}); give --key, or set {PREFIX}ADMIN_KEY, or "
            f"{PREFIX}DATA_DIR to the server's data folder"
        ) from None
    if not key:
        raise UnbindError(f"no admin key: '{path}' is empty; write the key into it, or give --key")
    return key
