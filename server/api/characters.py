"""Half surrogate pairs in a JSON body: Python takes them for characters, nothing that writes text does.

Looked for in one place, before any route reads its body, so that no string of any body can bring one.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request

from server.errors import invalid

# An escape or the bytes of a surrogate; whole pairs are looked at too, and found to be characters.
_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


async def whole_characters(request: Request) -> None:
    """Raise 400, naming the field, where a string of a JSON body holds half a surrogate pair."""
    if request.method not in ("POST", "PUT", "PATCH") or "json" not in request.headers.get("content-type", ""):
        return
    raw = await request.body()
    escaped = b"\\u" in raw or b"\xed" in raw  # looked for first: it is a hundred times as fast
    if not (escaped and _SUSPECT.search(raw)) and b"\x00" not in raw[:4]:  # a NUL there is UTF-16 or UTF-32
        return
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        return  # the route says so
    check_characters(body)


def check_characters(value: Any) -> None:
    """Raise 400, naming the field, where a string in what was JSON holds half a surrogate pair."""
    if (field := _half_character(value)) is not None:
        text = f"{field}: holds half of a surrogate pair, which is no character; mend its encoding"
        raise invalid(text, field, "invalid_value")


def _half_character(value: Any) -> str | None:
    """The path of the first string with half a surrogate pair; None where there is none."""
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        path, item = left.pop()
        if isinstance(item, dict):
            for key, inner in item.items():
                if not _is_text(key):
                    return path or "body"
                left.append((f"{path}.{key}" if path else key, inner))
        elif isinstance(item, list):
            left += ((f"{path}.{number}" if path else str(number), inner) for number, inner in enumerate(item))
        elif isinstance(item, str) and not _is_text(item):
            return path or "body"
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
