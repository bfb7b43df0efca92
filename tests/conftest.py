"""What holds for all tests."""

from __future__ import annotations

import pytest


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes are named by their argument: packed ones hold the time, and processes that share the tests must agree on names."""
    return argname if isinstance(val, bytes) else None
