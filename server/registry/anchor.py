"""Whether a file or folder is still the one that was opened: somebody may delete or replace it under a running process.

The operating system lets a process go on with a file that has no name any more; what is written to it is lost with the process.
"""

from __future__ import annotations

from pathlib import Path


class Anchor:
    """A path, and what lay there when this was made."""

    def __init__(self, path: Path, what: str) -> None:
        """``what`` names it in messages. Raises OSError where nothing is there."""
        self._path, self._what = path, what
        self._first = _identity(path)

    @property
    def lost(self) -> str | None:
        """What is wrong with it and what to do, None where all is well."""
        try:
            now = _identity(self._path)
        except FileNotFoundError:
            now = None
        except OSError:
            return None  # a file system that does not answer has lost nothing yet
        if now == self._first:
            return None
        what = "removed" if now is None else "replaced"
        return (
            f"{self._what} was {what} while the server ran, and nothing that is written now would be kept; stop the server, "
            "put the data folder back, and start again"
        )


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
