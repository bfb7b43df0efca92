"""Token buckets: how much a key may ask and use. Time is a parameter; nothing is kept over a restart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Bucket:
    left: float
    at: float


class RateLimiter:
    """A bucket for each name: ``burst`` at once, refilled at ``per_minute``."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def take(self, name: str, per_minute: float, burst: float, now: float, amount: float = 1.0) -> float:
        """Take ``amount``: 0 where it is there, else nothing is taken and the seconds are told until it will be."""
        wait = self.wait(name, per_minute, burst, now, amount)
        if wait == 0:
            self._buckets[name].left -= amount
        return wait

    def wait(self, name: str, per_minute: float, burst: float, now: float, amount: float = 1.0) -> float:
        """Seconds until ``amount`` is there."""
        bucket = self._filled(name, per_minute, burst, now)
        return max(0.0, (amount - bucket.left) * 60 / per_minute)

    def spend(self, name: str, per_minute: float, burst: float, now: float, amount: float) -> None:
        """Take ``amount``, there or not: what is known only afterwards is owed."""
        self._filled(name, per_minute, burst, now).left -= amount

    def _filled(self, name: str, per_minute: float, burst: float, now: float) -> _Bucket:
        bucket = self._buckets.setdefault(name, _Bucket(float(burst), now))
        bucket.left = min(float(burst), bucket.left + (now - bucket.at) * per_minute / 60)
        bucket.at = now
        return bucket
