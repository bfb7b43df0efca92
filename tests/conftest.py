"""What holds for all tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tests.support.prometheus import NOTE


def pytest_report_header() -> str:
    """Say whether alerts are tried by Prometheus."""
    return NOTE


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes are named by their argument: packed ones hold the time, and processes that share the tests must agree on names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the fast tests what takes longest comes first, so that no process waits for another at the end."""
    if config.option.markexpr == "not slow":
        items.sort(key=lambda item: not item.nodeid.startswith(("tests/system/", "tests/core/fitting/", "tests/lab/")))


def pytest_collection_finish() -> None:
    """What is imported stays: looking through it again and again is a tenth of what fast tests take."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Triton, in vLLM's environment, complains at length of what is left as the process ends."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that gives the forget rows of ``tests.support.memorising`` back, one for all processes that share the tests."""
    from tests.support.memorising import trained_once

    home = tmp_path_factory.getbasetemp()
    return trained_once(home.parent if "PYTEST_XDIST_WORKER" in os.environ else home)
