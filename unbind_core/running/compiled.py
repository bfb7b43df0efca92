"""Compiled models (``torch.compile``) run uncompiled: what was compiled without hooks would run without them, and what is compiled
with them would keep them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.compiler import set_stance

_lock = threading.Lock()


class _Uncompiled:
    """How many ask for it. It holds for the whole process, as torch knows no other way, from the first one to the last."""

    askers = 0
    stance: Any = None


def begin_uncompiled() -> None:
    """Nothing runs compiled until as many calls of :func:`end_uncompiled`."""
    with _lock:
        if not _Uncompiled.askers:
            _Uncompiled.stance = set_stance("force_eager")
        _Uncompiled.askers += 1


def end_uncompiled() -> None:
    """Take back one :func:`begin_uncompiled`."""
    with _lock:
        _Uncompiled.askers -= 1
        if not _Uncompiled.askers:
            _Uncompiled.stance.__exit__(None, None, None)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Nothing runs compiled inside; decorates functions too."""
    begin_uncompiled()
    try:
        yield
    finally:
        end_uncompiled()
