"""The one way of writing a JSON value that digests and signatures are made of. A change here changes all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def canonical_json(value: Any, *, nan: bool = True, plain: Callable[[Any], Any] | None = None) -> str:
    """Names in order, no spaces, ASCII alone. ``plain`` makes JSON of what is none.

    Raises TypeError where that cannot be, RecursionError, and ValueError on a number that is not finite, unless ``nan``.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=nan, default=plain)
