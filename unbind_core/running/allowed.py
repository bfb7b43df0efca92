"""What memory the system lets this process have: the control groups that it runs in, and its limit of address space."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
SELF = Path("/proc/self")


def allowed_bytes(groups: Path = GROUPS, self: Path = SELF) -> list[int]:
    """What is left under each limit there is, in bytes; none where nothing limits."""
    found = [left for folder in _folders(groups, self) if (left := _left(folder)) is not None]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and (size := _field(self / "status", "VmSize:")) is not None:
        found.append(max(0, soft - 1024 * size))
    return found


def _folders(groups: Path, self: Path) -> Iterator[Path]:
    """The folders of all groups that this process is in, theirs above them too: a limit anywhere on the way holds.

    A container sees its own group as the root, whatever its name is outside.
    """
    for line in _read(self / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            roots = [groups, groups / "unified"]
        elif "memory" in controllers.split(","):
            roots = [groups / "memory"]
        else:
            continue
        inside = PurePosixPath(path.removeprefix("/"))
        for root in roots:
            yield from (root / folder for folder in (inside, *inside.parents))


def _left(folder: Path) -> int | None:
    """What a group may still take, None where it is not limited. What was read from files and can be dropped counts as free."""
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, taken = _read(folder / limit).strip(), _read(folder / used).strip()
        if most.isdigit() and taken.isdigit():
            return max(0, int(most) - int(taken) + min(int(taken), _field(folder / "memory.stat", dropped) or 0))
    return None


def _field(path: Path, name: str) -> int | None:
    lines = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
