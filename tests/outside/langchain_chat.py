"""LangChain's standard tests of a chat model, against a live server; docs/clients.md says how they are run.

UNBIND_URL is the server. LANGCHAIN_CLIENT: ``openai`` (chats), ``responses``, or ``anthropic`` (messages). LANGCHAIN_TOOLS: the
model's chat template takes functions.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_tests.integration_tests import ChatModelIntegrationTests

CLIENT = os.environ.get("LANGCHAIN_CLIENT", "openai")
TOOLS = bool(os.environ.get("LANGCHAIN_TOOLS"))


class TestChat(ChatModelIntegrationTests):
    """The suite asks these properties what it may try."""

    @property
    def chat_model_class(self) -> Any:
        """The client's class."""
        if CLIENT == "anthropic":
            from langchain_anthropic import ChatAnthropic

            return ChatAnthropic
        from langchain_openai import ChatOpenAI

        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Its arguments; without ``stream_usage`` the client asks servers that are not OpenAI's for no usage."""
        url = os.environ["UNBIND_URL"]
        common = {"model": "unbind-demo", "api_key": "none", "max_tokens": 400}
        if CLIENT == "anthropic":
            return {**common, "base_url": url}
        return {**common, "base_url": f"{url}/v1", "stream_usage": True, "use_responses_api": CLIENT == "responses"}

    @property
    def has_tool_calling(self) -> bool:
        """Whether functions are tried."""
        return TOOLS

    @property
    def has_tool_choice(self) -> bool:
        """Whether calls are demanded."""
        return TOOLS

    @property
    def has_structured_output(self) -> bool:
        """Whether answers by a schema are tried; ChatAnthropic asks for them by a function."""
        return TOOLS or CLIENT != "anthropic"
