"""The other server: how it is asked, and what its refusals and failures mean for our client.

Of a client's headers none is passed on: the other server knows the operator's key, and nobody else's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from server.errors import ApiError
from server.proxy.events import parsed
from server.proxy.refusal import Unguardable
from unbind_core.errors import UnbindError

CONNECT_SECONDS = 10.0
MOST_BYTES = 64 * 1024 * 1024  # of an answer that comes at once
MOST_REFUSAL = 64 * 1024
MOST_MESSAGE = 2000  # characters
JSON, EVENTS = "application/json", "text/event-stream"
AGAIN = {"x-should-retry": "true"}  # as clients would by themselves, were no guard between
_PASSED = (400, 404, 409, 413, 415, 422, 429)  # refusals that are about what the client asked


@dataclass(eq=False)
class Refused(Exception):
    """The other server refused. ``message`` is its own and may hold any text, the model's too."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: str | None = None

    def told(self, message: str) -> ApiError:
        """What our client hears, with a ``message`` that may be sent."""
        if self.status in (401, 403):
            text = "the upstream refuses the key that this server gives it (--upstream-key); ask its operator"
            return ApiError(502, text, code="upstream_refuses_key")
        if self.status not in (*_PASSED, 503):
            again = AGAIN if self.status >= 500 else None
            return ApiError(502, f"the upstream answers {self.status}: {message}", code="upstream_error", headers=again)
        headers = {"Retry-After": self.retry_after or "10"} if self.status in (429, 503) else {}
        return ApiError(self.status, message, param=self.param, code=self.code, headers=headers)


class Upstream:
    """Connections to one OpenAI-compatible server. Raises UnbindError where its address is none."""

    def __init__(self, address: str, key: str) -> None:
        """How long an answer may take the limit of our own requests says."""
        self.address = checked_address(address)
        # One answer a connection: of bytes behind an answer's stated end the next would be made, which is another client's.
        headers = {"Accept-Encoding": "identity", "Connection": "close", "User-Agent": "unbind"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx2.AsyncClient(
            base_url=self.address,
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Give the connections back."""
        await self._client.aclose()

    @asynccontextmanager
    async def asked(self, path: str, body: bytes | None, accept: str) -> AsyncIterator[httpx2.Response]:
        """An answer with status 200 of the type that is accepted, its body still to be read; left, the connection is closed.

        Raises Refused, Unguardable, ApiError.
        """
        headers = {"Accept": accept, **({"Content-Type": JSON} if body is not None else {})}
        with failures():
            request = self._client.build_request("GET" if body is None else "POST", path, content=body, headers=headers)
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != 200:
                    raise await _refusal(response)
                encoding = response.headers.get("content-encoding", "identity")
                kind, _, parameters = response.headers.get("content-type", "").lower().partition(";")
                charset = parameters.partition("charset=")[2].strip(' "')
                if encoding != "identity" or kind.strip() != accept or charset not in ("", "utf-8", "utf8"):
                    raise Unguardable(
                        f"it is '{kind[:80]}' {charset[:20]} encoded as '{encoding[:80]}', not plain {accept}"
                    )
                yield response
            finally:
                await response.aclose()


class failures:  # noqa: N801 - reads as what it is: with failures()
    """Failures of the connection as the errors of this API."""

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise ApiError where it was one of the connection."""
        if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
            text = "the upstream cannot be reached; try again"
            raise ApiError(503, text, code="upstream_unreachable", headers={"Retry-After": "5"}) from None
        if isinstance(error, (httpx2.HTTPError, httpx2.StreamError)):
            raise broken_off("the upstream broke its answer off; try again") from None


def broken_off(message: str) -> ApiError:
    """The other server did not come to the end of its answer."""
    return ApiError(502, message, code="upstream_broken", headers=AGAIN)


async def whole(response: httpx2.Response, most: int = MOST_BYTES) -> bytes:
    """The body. Raises Unguardable where it is too large."""
    parts, size = [], 0
    async for chunk in response.aiter_raw():
        parts.append(chunk)
        size += len(chunk)
        if size > most:
            raise Unguardable(f"it is larger than {most} bytes")
    return b"".join(parts)


async def _refusal(response: httpx2.Response) -> Refused:
    document: dict[str, Any] = {}
    if "content-encoding" not in response.headers:
        with suppress(Unguardable):
            document = parsed(await whole(response, MOST_REFUSAL))
    return refusal_of(document, response.status_code, response.headers.get("retry-after", ""))


def refusal_of(document: dict[str, Any], status: int, retry_after: str = "") -> Refused:
    """What an error object says, in the form of OpenAI or that of FastAPI."""
    error = document.get("error", document)
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        error = {}
    message = error.get("message") or _detailed(error.get("detail"))
    said = message[:MOST_MESSAGE] if message and isinstance(message, str) else "it does not say why"
    return Refused(
        status,
        said.encode(
            errors="replace"
        ).decode(),  # half of a surrogate pair, as of what a model was cut in, could not be sent
        _short(error.get("param")),
        _short(error.get("code")),
        retry_after if retry_after.isdigit() and len(retry_after) < 6 else None,
    )


def _detailed(detail: Any) -> Any:
    """FastAPI's list of what is wrong, as a text; all else as it is. What was sent stands in it too, and is left out."""
    if not isinstance(detail, list):
        return detail
    wrong = [one for one in detail if isinstance(one, dict) and isinstance(one.get("loc"), list)]
    return "; ".join(
        f"{'.'.join(str(part) for part in one['loc'] if part != 'body')}: {one.get('msg')}" for one in wrong
    )


def _short(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) <= 64 and value.isprintable() else None


def checked_address(address: str) -> str:
    """The address without its ``/v1``. Raises UnbindError."""
    try:
        url = httpx2.URL(address)
    except httpx2.InvalidURL:
        url = httpx2.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise UnbindError(f"--upstream: '{address[:200]}' is not an address such as http://127.0.0.1:8001")
    return address.rstrip("/").removesuffix("/v1")
