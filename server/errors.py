"""Domain exceptions -> errors as clients read them, in this one place.

Every refusal of the service is an ``ApiError`` or one of the exceptions translated below; clients see
``{"error": {"message", "type", "param", "code"}}``, those of Anthropic's routes ``{"type": "error", "error": {...}}``.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import PydanticCustomError
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.engine.refusals import EngineStopped, PromptTooLong, QueueFull
from server.registry.objects import StoreUnreachable
from server.registry.refusals import AWAY, DatabaseDamaged, DatabaseForbidden, DatabaseGone, DatabaseReads
from unbind_core.errors import DataError, InsufficientRows, UnbindError, UnknownModule

log = logging.getLogger("unbind.api")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
REFUSED_KEY = "unbind.refused"  # where a refusal leaves its code for who counts them
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_PATH = re.compile(r"(?:/p/[^/]+)?/v1/messages(?:/.*)?")
_BRANCHES = ("str", "constrained-str", "int", "float", "bool")
# What pydantic says of a body that is none.
_NO_OBJECT = ("missing", "model_attributes_type", "model_type", "dict_type")


class ApiError(Exception):
    """A refusal with its status; ``param`` names the field, ``code`` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400 naming the field."""
    return ApiError(400, message, param=param, code=code)


def field_error(field: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """For a validator that looks at several fields, whose ValueError would name none of them."""
    return PydanticCustomError(code, "{message}", {"message": message, "param": field})


def disk_full() -> ApiError:
    """507: nothing can be written."""
    return ApiError(
        507,
        "the server's disk is full, or its limit of writing is reached; make room in its data folder, or where its log says",
        code="disk_full",
    )


def not_writable(reason: str) -> ApiError:
    """503: the system refuses what is to be read or written, as on a disk that turned read-only or failed."""
    return ApiError(
        503,
        f"the server cannot use its own files ({reason}); serving goes on. See that its data folder, or what its log "
        "names, is a folder on a sound disk that can be written to, and belongs to the account that serves",
        code="not_writable",
        headers={"Retry-After": "60"},
    )


def unreachable(error: Exception) -> ApiError:
    """503 for a database that does not answer, is gone or damaged, or that cannot write; 507 where its disk is full."""
    if isinstance(error, (DatabaseGone, DatabaseDamaged)):
        return ApiError(503, str(error), code="data_lost", headers={"Retry-After": "60"})
    if isinstance(error, DatabaseForbidden):
        return ApiError(503, str(error), code="registry_unreachable", headers={"Retry-After": "60"})
    if isinstance(error, DBAPIError) and "disk is full" in str(error.orig):  # as SQLite says it
        return disk_full()
    if isinstance(error, DBAPIError) and (said := re.search("readonly database|disk I/O error", str(error.orig))):
        return not_writable(f"the registry: {said[0]}")
    told = str(error) if isinstance(error, DatabaseReads) else "the registry's database does not answer; try again"
    return ApiError(503, told, code="registry_unreachable", headers={"Retry-After": "5"})


def is_anthropic(path: str) -> bool:
    """Whether a path, with or without its profile, is one that Anthropic's clients ask."""
    return _ANTHROPIC_PATH.fullmatch(path) is not None


def error_body(error: ApiError, path: str = "") -> dict[str, Any]:
    """The error object as the official clients that ask at ``path`` read it."""
    told = {"message": error.message, "param": error.param, "code": error.code}
    if is_anthropic(path):
        kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, **told}}
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"type": kind, **told}}


def translate(error: Exception) -> ApiError:
    """Any exception as the refusal it means; what is not foreseen is a 500 that tells nothing of its inside."""
    match error:
        case ApiError():
            return error
        case UnknownModule():
            return ApiError(400, str(error), param="unbind.modules", code="unknown_module")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
        case PromptTooLong():
            return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
        case EngineStopped():
            return ApiError(503, str(error), code=error.code, headers={"Retry-After": "10"})
        case DataError() | InsufficientRows():
            return ApiError(400, str(error), param="rows", code="bad_rows")
        case UnbindError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return _validation(error)
        case StoreUnreachable():
            return ApiError(503, f"{error}; try again", code="store_unreachable", headers={"Retry-After": "10"})
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EFBIG):
            log.error("there is no room for its own files: %s", error)
            return disk_full()
        case OSError(errno=errno.EROFS | errno.EACCES | errno.EPERM | errno.EIO | errno.EEXIST | errno.ENOTDIR):
            log.error("its own files cannot be used: %s", error)
            return not_writable(error.strerror or type(error).__name__)
        case _ if isinstance(error, AWAY):
            return unreachable(error)
        case HTTPException(__cause__=(ValueError() | RecursionError()) as cause):
            return ApiError(400, _unread(cause), code="invalid_json")
        case ClientDisconnect():  # nobody reads it
            return ApiError(400, "the client left before the body had come")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            log.error("unhandled error", exc_info=error)
            return ApiError(500, "the server met an error it did not foresee; its log has the details", code="internal")


def _unread(cause: ValueError | RecursionError) -> str:
    """Why a body is no JSON that can be read."""
    match cause:
        case RecursionError():
            return "the body is nested too deeply to be read"
        case UnicodeDecodeError():
            return "the body is not valid JSON: its bytes are no UTF-8"
        case _:
            return "the body is not valid JSON: a number in it has too many digits"


def _validation(error: RequestValidationError) -> ApiError:
    """The first thing wrong with a body, its field named by path; the offending value is not repeated."""
    # a union reports an error for each of its branches, with the branch's name in the path: the deepest says most, and of those one
    # of the branch that was meant, whose kind is right
    first = max(error.errors(), key=lambda found: (len(found["loc"]), not found["type"].endswith("_type")))
    path = list(_fields(first["loc"][1:], error.body))
    if named := first.get("ctx", {}).get("param"):
        path.append(named)
    field = ".".join(path) or None
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if field is None and first["type"] in _NO_OBJECT:
        return ApiError(
            400,
            "the body must be a JSON object; send one, with the header Content-Type: application/json",
            code="invalid_value",
        )
    message = first["msg"].removeprefix("Value error, ")
    code = first["type"] if first["type"] == "unsupported_parameter" else "invalid_value"
    return ApiError(400, f"{field}: {message}" if field else message, param=field, code=code)


def _fields(path: Sequence[str | int], body: Any) -> Iterator[str]:
    """A path without the names of branches: those of kinds and of classes, where the body itself has nothing by that name."""
    for part in path:
        in_list = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if in_list or (isinstance(body, dict) and part in body):
            body = body[part]
        elif isinstance(part, str) and (part in _BRANCHES or "[" in part or part.lstrip("_")[:1].isupper()):
            continue
        yield str(part)


class _Refusal(JSONResponse):
    """Leaves its code in the scope of the request that it answers."""

    def __init__(self, refusal: ApiError, path: str, headers: Mapping[str, str]) -> None:
        self._code = refusal.code
        super().__init__(error_body(refusal, path), refusal.status, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REFUSED_KEY] = self._code
        await super().__call__(scope, receive, send)


def response(error: Exception, path: str = "") -> JSONResponse:
    """The refusal as a response to who asked at ``path``, with the hint whether trying again can help."""
    refusal = translate(error)
    headers = dict(refusal.headers)
    if refusal.status not in (408, 429, 503):
        headers.setdefault("x-should-retry", "false")
    return _Refusal(refusal, path, headers)


def _unknown_route(request: Request, app: FastAPI) -> ApiError:
    """What was asked for and what there is instead, so that nobody searches for the cause in a bare 404."""
    # of the routes themselves: the whole description takes a second to build, in which the event loop would stand still
    paths = {route.path_format for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema}
    known = ", ".join(path for path in sorted(paths) if not path.startswith("/admin/"))
    text = f"{request.method} {request.url.path[:200]} is not a route of this server; there are: {known}"
    return ApiError(404, text, code="unknown_route")


def _other_method(request: Request, error: HTTPException) -> ApiError:
    allowed = (error.headers or {}).get("Allow", "another")
    text = f"{request.url.path[:200]} takes {allowed}, not {request.method}"
    return ApiError(405, text, code="wrong_method", headers=error.headers)


def describe_refusals(description: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI description in which every operation may answer with an error object, and none with FastAPI's own 422."""
    schemas = description["components"]["schemas"]
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    text, perhaps = {"type": "string"}, {"type": ["string", "null"]}
    told = {"type": text, "message": text, "param": perhaps, "code": perhaps}
    error = {"type": "object", "properties": told, "required": list(told)}
    whole = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    theirs = {**whole, "properties": {"type": {"const": "error"}, "error": error}, "required": ["type", "error"]}
    schemas |= {"Error": whole, "AnthropicError": theirs}
    for path, operations in description["paths"].items():
        name = "AnthropicError" if is_anthropic(path) else "Error"
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "A refusal, or an error", "content": body}
    return description


def install(app: FastAPI) -> None:
    """Every exception of every route goes through ``response``."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code == 404:  # ours are ApiErrors: this is the router's
            error = _unknown_route(request, app)
        elif isinstance(error, HTTPException) and error.status_code == 405:
            error = _other_method(request, error)
        return response(error, request.url.path)

    for kind in (
        ApiError,
        UnbindError,
        QueueFull,
        PromptTooLong,
        EngineStopped,
        RequestValidationError,
        HTTPException,
        ClientDisconnect,
        OSError,
        *AWAY,
        Exception,  # what is left to this one alone counts as a 500 whatever is answered, and its traceback is shown
    ):
        app.add_exception_handler(kind, handle)
