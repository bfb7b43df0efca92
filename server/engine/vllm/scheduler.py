"""vLLM's schedulers, where a prefix is used again only once it is computed, and as far as the same gates were forced; loaded by
vLLM in the process that schedules.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from server.collector import leave_at_once

_extra_keys = kv_cache_utils.generate_block_hash_extra_keys


def extra_keys(request: Any, start: int, end: int, start_mm_idx: int) -> tuple[tuple[Any, ...] | None, int]:
    """What a page's keys and values depend on beside its tokens and the pages before it: of vLLM's own, and where a guard has gates
    forced in it. Behind what is settled a page is one answer's alone.
    """
    found, following = _extra_keys(request, start, end, start_mm_idx)
    asked = (request.sampling_params and request.sampling_params.extra_args) or {}
    if (settled := asked.get("settled")) is None:
        return found, following
    own = [("flight", asked["flight"])] if end > settled else []
    parts = ((name, max(first, start), min(last, end), eased) for name, first, last, eased in asked["forced"])
    within = [("forced", *part) for part in parts if part[1] < part[2]]
    return ((*(found or ()), *own, *within) or None), following


kv_cache_utils.generate_block_hash_extra_keys = extra_keys


class _Computed:
    """vLLM offers a page to others as soon as it is scheduled, so that of equal prompts in one step the second reads what the first
    writes in that very step. Attention does so at each layer; what gates remember of a prefix has to be there before, so pages of
    the step that is being put together count as not there yet.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        leave_at_once()
        self._ahead: set[int] = set()  # pages that the step which is being put together will fill
        pool: Any = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        insert, find = pool._insert_block_hash, pool.get_cached_block

        def inserted(key: Any, block: Any, *others: Any, **named: Any) -> Any:
            self._ahead.add(block.block_id)
            return insert(key, block, *others, **named)

        def found(*asked: Any) -> Any:
            blocks = find(*asked)
            return None if blocks and any(block.block_id in self._ahead for block in blocks) else blocks

        pool._insert_block_hash, pool.get_cached_block = inserted, found

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """The next step."""
        self._ahead.clear()
        return super().schedule(*arguments, **options)  # type: ignore[misc]


class GatedScheduler(_Computed, Scheduler):  # type: ignore[misc]
    """The one that waits for a step's tokens."""


class GatedAsyncScheduler(_Computed, AsyncScheduler):  # type: ignore[misc]
    """The one that does not."""
