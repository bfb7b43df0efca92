"""What one large body costs everybody else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from server import encoding
from tests.support.live import TOOL_TEMPLATE, live
from unbind_core.encoding import encode


def test_whatever_a_long_prompt_is_made_of_a_thread_tokenises_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    inline = 1000  # of a model with a short context no long text is tokenised

    def watched(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        if len(text) > inline:
            seen.append(threading.current_thread().name)
        return encode(tokenizer, text)

    monkeypatch.setattr(encoding, "encode", watched)
    monkeypatch.setattr(encoding, "encode_behind", watched)
    monkeypatch.setattr(encoding, "INLINE", inline)
    long = "a b " * (inline // 4 + 9)
    turn: dict[str, Any] = {"role": "user", "content": "go"}
    function = {"type": "function", "function": {"name": "f", "description": long}}
    schema = {"type": "function", "function": {"name": "f", "parameters": {"title": long}}}
    called = {"id": long, "type": "function", "function": {"name": "f"}}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [turn], "tools": [function]}),
        ("/v1/chat/completions", {"messages": [turn], "tools": [schema]}),
        ("/apply-template", {"messages": [turn], "tools": [function]}),
        ("/tokenize", {"messages": [turn, {"role": "assistant", "tool_calls": [called]}]}),
        ("/infill", {"input_prefix": "a", "input_extra": [{"filename": long, "text": ""}], "n_predict": 1}),
    ]
    template = TOOL_TEMPLATE.replace('{"name"', '{"id": "{{ call.id }}", "name"')
    with live(checkpoint, tmp_path, template=template) as running:
        for path, body in asked:
            seen.clear()
            running.call(path, body)
            assert seen and all(name.startswith("unbind-tokens") for name in seen), (path, seen)
