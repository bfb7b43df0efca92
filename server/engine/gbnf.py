"""Grammars as llama.cpp writes them (GBNF), which become llguidance's own (Lark)."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

# Tells as the library does, which looks at all blank lines behind each: of 65,000 that takes half a minute, and no thread goes on.
_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)


def as_lark(text: str) -> str:
    """A grammar of either kind in Lark. Raises ValueError."""
    if _LARK.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001 - it has no other kind for what it does not understand
        raise ValueError(f"Failed to convert the grammar from GBNF to Lark: {error}") from None
