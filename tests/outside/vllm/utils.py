"""Stands where vLLM's tests expect the helper that starts a server: the server runs already."""

from __future__ import annotations

import os
from typing import Any

from openai import AsyncOpenAI, OpenAI


class RemoteOpenAIServer:
    """The server at ``UNBIND_URL``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.url_root = os.environ["UNBIND_URL"]
        self._client = {"base_url": self.url_for("v1"), "api_key": "none", "max_retries": 0, "timeout": 60}

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """An address on it."""
        return "/".join((self.url_root, *parts))

    def get_client(self, **_: Any) -> OpenAI:
        """The official client."""
        return OpenAI(**self._client)

    def get_async_client(self, **_: Any) -> AsyncOpenAI:
        """The official client, async."""
        return AsyncOpenAI(**self._client)
