"""Token buckets: how often a key may ask. Time is a parameter; nothing is kept over a restart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Bucket:
    tokens: float
    at: float


class RateLimiter:
    """One bucket for each key: ``burst`` requests at once, refilled at ``per_minute``."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def take(self, key: str, per_minute: float, burst: int, now: float) -> float:
        """Take one request: 0 where it may pass, else the seconds until the next one may."""
        bucket = self._buckets.setdefault(key, _Bucket(float(burst), now))
        bucket.tokens = min(float(burst), bucket.tokens + (now - bucket.at) * per_minute / 60)
        bucket.at = now
        if bucket.tokens >= 1:
            bucket.tokens -= 1
            return 0.0
        return (1 - bucket.tokens) * 60 / per_minute
