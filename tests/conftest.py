"""What holds for all tests."""

from __future__ import annotations

import pytest

from tests.support.prometheus import NOTE


def pytest_report_header() -> str:
    """Say whether alerts are tried by Prometheus."""
    return NOTE


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes are named by their argument: packed ones hold the time, and processes that share the tests must agree on names."""
    return argname if isinstance(val, bytes) else None
