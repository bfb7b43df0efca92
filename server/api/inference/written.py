"""JSON that a model or a client wrote, read where it is to be written again."""

from __future__ import annotations

import json
from typing import Any


def rewritable(text: str) -> Any:
    """What a text of JSON means. Raises ValueError where it is none, and where Python reads of it what no JSON can say: half of a
    surrogate pair (an escape), a number beyond a float's range (1e999), NaN.
    """
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found
