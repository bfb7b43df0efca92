"""Lets vLLM's HTTP tests run without vLLM: its modules are stand-ins, its tokenizer is the demo model's."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from tokenizers import Tokenizer


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of packages that are not needed over HTTP."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """A package for each name."""
        if name.split(".", maxsplit=1)[0] not in ("vllm", "torch", "pybase64"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """A stand-in."""
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class DemoTokenizer:
    """As much of a tokenizer as the tests ask for."""

    eos_token_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._own = Tokenizer.from_file(os.environ["UNBIND_TOKENIZER"])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        return list(self._own.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: int | list[int], skip_special_tokens: bool = False) -> str:
        """Ids to text."""
        given = [ids] if isinstance(ids, int) else ids
        return str(self._own.decode(given, skip_special_tokens=skip_special_tokens))


sys.meta_path.insert(0, Absent())
importlib.import_module("vllm.tokenizers").get_tokenizer = DemoTokenizer  # type: ignore[attr-defined]
