"""Why an engine does not take a request up, whichever engine it is."""

from __future__ import annotations


class EngineStopped(Exception):
    """The engine shuts down or is down; nothing more is admitted."""


class QueueFull(Exception):
    """No room in the admission queue; the caller should come back after ``retry_after`` seconds."""

    retry_after = 1


class PromptTooLong(Exception):
    """The prompt, or the prompt with its answer, does not fit the slots; the message says by how many tokens."""
