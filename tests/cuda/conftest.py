"""What runs on a GPU, where there is one; without it nothing is collected."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    """Say whether anything is tried on a GPU."""
    return f"CUDA: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'left out, there is no device'}"
