"""A set of 64-bit fingerprints that takes little room: sorted, found by a table of its beginnings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Sorted = NDArray[np.uint64]
_PER_BUCKET = 4


class Fingerprints:
    """Membership of evenly spread 64-bit numbers in constant time; 8 bytes each, and one for the table."""

    def __init__(self, values: Sorted) -> None:
        """``values`` uint64 [n]: in order, each once."""
        self.values = values
        bits = max(1, (len(values) // _PER_BUCKET).bit_length())
        self._shift = 64 - bits
        beginnings = np.arange(2**bits, dtype=np.uint64) << np.uint64(self._shift)
        starts = np.append(np.searchsorted(values, beginnings), len(values))
        self._starts = memoryview(starts.astype(np.uint32 if len(values) < 2**32 else np.uint64).data)
        self._values = memoryview(values.data)

    def __contains__(self, fingerprint: int) -> bool:
        bucket = fingerprint >> self._shift
        return fingerprint in self._values[self._starts[bucket] : self._starts[bucket + 1]]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, table included."""
        return self.values.nbytes + self._starts.nbytes
