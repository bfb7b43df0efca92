"""Why an engine does not take a request up, whichever engine it is."""

from __future__ import annotations


class EngineStopped(Exception):
    """The engine shuts down or is down; nothing more is admitted."""

    code = "shutting_down"  # which error it is to clients


class EngineRestarts(EngineStopped):
    """What computes has ended and is started again: who waits a little is served here."""

    code = "not_ready"


class QueueFull(Exception):
    """No room in the admission queue; the caller should come back after ``retry_after`` seconds."""

    retry_after = 1


class PromptTooLong(Exception):
    """The prompt, or the prompt with its answer, does not fit the slots; the message says by how many tokens."""
