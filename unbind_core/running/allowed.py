"""What the system lets this process have: memory and processors by its control groups, address space by its own limit."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
SELF = Path("/proc/self")


def allowed_bytes(groups: Path = GROUPS, self: Path = SELF) -> list[int]:
    """What is left under each limit there is, in bytes; none where nothing limits."""
    found = [left for folder in _folders(groups, self, "memory") if (left := _left(folder)) is not None]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and (size := _field(self / "status", "VmSize:")) is not None:
        found.append(max(0, soft - 1024 * size))
    return found


def allowed_processors(groups: Path = GROUPS, self: Path = SELF) -> int | None:
    """How many processors' time it may use at most, rounded up; None where nothing limits."""
    quotas = [quota for folder in _folders(groups, self, "cpu") if (quota := _quota(folder)) is not None]
    return max(1, math.ceil(min(quotas))) if quotas else None


def _folders(groups: Path, self: Path, controller: str) -> Iterator[Path]:
    """The folders of all groups that this process is in, theirs above them too: a limit anywhere on the way holds.

    A container sees its own group as the root, whatever its name is outside.
    """
    for line in _read(self / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            roots = [groups, groups / "unified"]
        elif controller in controllers.split(","):
            roots = [groups / controller]
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


def _quota(folder: Path) -> float | None:
    """Of how many processors a group may use all of the time, None where it is not limited."""
    most, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not most:
        most, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(most) / int(period) if most.isdigit() and period.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    lines = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
