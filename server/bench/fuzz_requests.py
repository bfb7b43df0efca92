"""Requests that nobody should send, drawn from a service's own description: what ``bench fuzz`` sends.

A body is made from the route's schema and then spoilt; uploads are damaged archives; the rest is HTTP that is none.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote

from server.bench.fuzz_words import BROKEN, HEADERS, HOSTILE, RAW, SENSIBLE, SOURCE, TAKEDOWN_BODY, TAKEDOWNS


@dataclass(frozen=True)
class Call:
    """One request. ``raw`` goes over a socket as it is; otherwise method, target, headers and body do."""

    kind: str
    method: str = ""
    target: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    raw: bytes = b""

    def shown(self) -> bytes:
        """The request as it can be looked at, and nearly as it was sent."""
        lines = [f"{self.method} {self.target}", *(f"{name}: {value}" for name, value in self.headers)]
        return self.raw or "\n".join(lines).encode("utf-8", "replace") + b"\n\n" + self.body


class Requests:
    """Draws requests from an OpenAPI document."""

    def __init__(self, description: dict[str, Any], modules: list[str], rng: Random) -> None:
        self._description, self._rng = description, rng
        self._sensible = SENSIBLE | {"modules": modules[:1], "enforced": [], "shadow": modules[:1]}
        self._operations = [
            (method.upper(), path, operation)
            for path, operations in description["paths"].items()
            for method, operation in operations.items()
        ]
        self.known: list[str] = [
            *modules,
            "global",
            "fuzz",
            "suspend",
        ]  # what parts of paths are filled with; answers add ids

    def draw(self) -> Call:
        """The next request."""
        chance = self._rng.random()
        if chance < 0.05:
            return Call(
                "raw", raw=self._torn(self._rng.choice(RAW)) if self._rng.random() < 0.5 else self._rng.choice(RAW)
            )
        method, path, operation = self._rng.choice(self._operations)
        content = operation.get("requestBody", {}).get("content", {})
        while (
            not content and path != TAKEDOWNS and self._rng.random() < 0.8
        ):  # most routes only read, and take nothing to spoil
            method, path, operation = self._rng.choice(self._operations)
            content = operation.get("requestBody", {}).get("content", {})
        if not content and (method, path) == ("POST", TAKEDOWNS):
            content = {"application/json": {"schema": TAKEDOWN_BODY}, "multipart/form-data": {}}
        headers = {"Content-Type": "application/json"}
        kind, body = "plain", b""
        if "multipart/form-data" in content and self._rng.random() < 0.5:
            kind, body = "upload", self._upload()
            headers["Content-Type"] = "multipart/form-data; boundary=b"
        elif content:
            kind, body = "json", self._body(content["application/json"]["schema"])
        if self._rng.random() < 0.1:
            name, values = self._rng.choice(HEADERS)
            headers[name] = self._rng.choice(values)
        if self._rng.random() < 0.03:
            method = self._rng.choice(("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "POST", "BREW"))
        return Call(kind, method, self._target(path, operation), tuple(headers.items()), body)

    def _target(self, path: str, operation: dict[str, Any]) -> str:
        query = []
        for parameter in operation.get("parameters", ()):
            value = str(self._rng.choice(self.known if self._rng.random() < 0.7 else HOSTILE))[:2000]
            value = quote(value, safe="", errors="surrogatepass")
            if parameter["in"] == "path":
                path = path.replace("{" + parameter["name"] + "}", value or "x")
            elif parameter["in"] == "query" and self._rng.random() < 0.3:
                query.append(f"{parameter['name']}={value}")
        return path + ("?" + "&".join(query) if query else "") + ("/" if self._rng.random() < 0.02 else "")

    def _body(self, schema: dict[str, Any]) -> bytes:
        if self._rng.random() < 0.05:
            return self._rng.choice(BROKEN)
        body = self._example(schema)
        for _ in range(self._rng.choice((0, 1, 1, 1, 2, 3))):
            self._spoil(body)
        raw = json.dumps(body).encode()
        return self._torn(raw) if self._rng.random() < 0.05 else raw

    def _example(self, schema: dict[str, Any], name: str = "", depth: int = 0) -> Any:
        while "$ref" in schema:
            found: Any = self._description
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found.get(part, {})
            schema = found
        if name in self._sensible and self._rng.random() < 0.95:
            return deepcopy(self._sensible[name])
        if several := schema.get("anyOf") or schema.get("oneOf"):
            return self._example(self._rng.choice(several), depth=depth)
        if "enum" in schema or "const" in schema:
            return self._rng.choice(schema.get("enum") or [schema["const"]])
        if "default" in schema and self._rng.random() < 0.5:
            return deepcopy(schema["default"])
        match schema.get("type"):
            case "object" if depth < 6:
                required = schema.get("required", ())
                wanted = {
                    key: value
                    for key, value in schema.get("properties", {}).items()
                    if key in required or self._rng.random() < 0.25
                }
                return {key: self._example(value, key, depth + 1) for key, value in wanted.items()}
            case "array" if depth < 6:
                return [self._example(schema.get("items", {}), depth=depth + 1)]
            case "integer" | "number":
                return max(schema.get("minimum", 1), min(schema.get("maximum", 1), 1))
            case "boolean":
                return self._rng.random() < 0.5
            case "null":
                return None
        return "a"

    def _spoil(self, body: Any) -> None:
        """Replace, add or remove something at a random depth."""
        place = body
        while isinstance(place, dict) and place:
            key = self._rng.choice(tuple(place))
            inner = place[key][0] if isinstance(place[key], list) and place[key] else place[key]
            if isinstance(inner, dict) and inner and self._rng.random() < 0.5:
                place = inner
                continue
            action = self._rng.randrange(6)
            if action == 0:
                del place[key]
            else:
                name = self._rng.choice(("x", "", "é", "\ud800", "modules")) if action == 1 else key
                place[name] = deepcopy(self._rng.choice(HOSTILE))
            return

    def _torn(self, data: bytes) -> bytes:
        """``data`` with some bytes replaced, removed or added, perhaps cut off."""
        for _ in range(self._rng.randrange(1, 4)):
            at = self._rng.randrange(len(data) + 1)
            data = data[:at] + self._rng.randbytes(self._rng.randrange(4)) + data[at + self._rng.randrange(4) :]
        return data[: self._rng.randrange(len(data) + 1)] if self._rng.random() < 0.2 else data

    def _upload(self) -> bytes:
        kind = self._rng.randrange(3)
        data = b'{"prompt": "def f():", "continuation": "return 1"}\n' * 3 if kind == 0 else b""
        out = io.BytesIO()
        if kind == 1:
            with zipfile.ZipFile(out, "w", self._rng.choice((0, 8, 12, 14))) as packed:
                packed.writestr("a.py", SOURCE)
                packed.writestr("b/c.py", SOURCE)
            data = self._torn(out.getvalue())
        elif kind == 2:
            with tarfile.open(fileobj=out, mode="w", format=self._rng.choice((0, 1, 2))) as archive:
                member = tarfile.TarInfo("é/a.py")
                member.size = len(SOURCE)
                member.pax_headers = self._rng.choice(({}, {"GNU.sparse.map": "0,9", "GNU.sparse.size": "99999999999"}))
                archive.addfile(member, io.BytesIO(SOURCE))
            data = gzip.compress(self._torn(out.getvalue()), 1)
        if self._rng.random() < 0.3:
            data = self._torn(data)
        options = json.dumps({"dry_run": True} if self._rng.random() < 0.9 else self._rng.choice(HOSTILE))
        parts = {"name": "fuzz", "options": options, "include": "*"}
        lines = [
            f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in parts.items()
        ]
        head = '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        whole = "".join(lines).encode() + head.encode() + data + b"\r\n--b--\r\n"
        return self._torn(whole) if self._rng.random() < 0.2 else whole
