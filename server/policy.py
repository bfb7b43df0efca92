"""Which modules apply to a call, and why.

Requests only add: "not named" never means "off". Sources today: the body's ``unbind.modules`` and the header
``X-Unbind-Modules``; profiles, keys and enforced sets join them here.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.modules import ModuleTable
from server.engine.pinned import PinnedSet
from server.errors import invalid

HEADER = "X-Unbind-Modules"
MAX_NAMED = 4096


def requested_names(body: Sequence[str] | None, header: str | None) -> tuple[str, ...]:
    """The union of both sources, in the order of first mention."""
    named = [*(body or ()), *(part.strip() for part in (header or "").split(","))]
    names = tuple(dict.fromkeys(name for name in named if name))
    if len(names) > MAX_NAMED:
        raise invalid(
            f"unbind.modules: {len(names)} names; at most {MAX_NAMED} can be on in one call", "unbind.modules"
        )
    return names


def effective(table: ModuleTable, body: Sequence[str] | None, header: str | None) -> PinnedSet:
    """The pinned modules of one call. Raises UnknownModule."""
    return table.pin(requested_names(body, header))
