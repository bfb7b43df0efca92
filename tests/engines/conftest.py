"""What tests of engines share, where there is vLLM; without it they are not collected."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.engines.both import engines
    from tests.engines.hollow import hollow

    __all__ = ["engines", "hollow"]
