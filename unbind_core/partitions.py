"""Which rows a module was fitted, calibrated and judged on: their indices, by part.

Thousands of modules that were fitted beside the same retain rows have the same: one in memory, and looked through once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain

# In every file; the certificate's rows came later.
FIRST_PARTITIONS = ("forget_fit", "forget_calibration", "forget_validation", "retain_fit", "retain_calibration")
PARTITIONS = (*FIRST_PARTITIONS, "retain_certificate")


class RowsByPart(Mapping[str, tuple[int, ...]]):
    """Row indices by part, which cannot change."""

    def __init__(self, rows: Mapping[str, Iterable[int]]) -> None:
        """Takes a copy."""
        self._rows = {part: tuple(indices) for part, indices in rows.items()}

    def __getitem__(self, part: str) -> tuple[int, ...]:
        """The rows of one part. Raises KeyError."""
        return self._rows[part]

    def __iter__(self) -> Iterator[str]:
        """The parts."""
        return iter(self._rows)

    def __len__(self) -> int:
        """How many parts there are."""
        return len(self._rows)

    @cached_property
    def problem(self) -> str | None:
        """What is wrong with them, as a message goes on behind "partitions"; None where nothing is."""
        for part in self:
            if part not in PARTITIONS:
                return f"has an unknown part '{part}'; known are {', '.join(PARTITIONS)}"
        for kind in ("forget", "retain"):
            rows = list(chain.from_iterable(self.get(part, ()) for part in PARTITIONS if part.startswith(kind)))
            if set(map(type, rows)) - {int} or min(rows, default=0) < 0 or len(rows) != len(set(rows)):
                return f"of the {kind} rows must be distinct row indices, each in one part"
        return None


def are_whole_numbers(value: object) -> bool:
    """Whether this is an object of lists of whole numbers, as JSON has them, or what was made of one that is."""
    return isinstance(value, RowsByPart) or (
        isinstance(value, dict)
        and all(isinstance(rows, (list, tuple)) and set(map(type, rows)) <= {int} for rows in value.values())
    )
