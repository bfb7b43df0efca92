"""What the other server sent cannot be passed on: it is not understood, so that nobody could say what it holds."""

from __future__ import annotations


class Unguardable(Exception):
    """An answer that cannot be followed whole; the text says which part of it."""
