"""Static batching: a batch starts together and ends together. The baseline that continuous batching replaced.

While the longest request of the batch finishes, the rows of the others stand idle, and whoever arrives waits for all.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from nanofw.laws import FLAT, CountLaw
from nanofw.scheduler import Limits, Schedule, Scheduler

if TYPE_CHECKING:
    from nanofw.kv_cache import KVCache
    from nanofw.request import Request
    from nanofw.table import RequestTable


class StaticScheduler(Scheduler):
    """Fills a batch from the queue, reserving each request's whole length, and takes no other until all have ended."""

    laws = (
        *(law for law in FLAT if law != CountLaw("python_calls")),
        CountLaw("python_calls", grows_with=("B",)),  # as textbooks have it: it asks each request for its row
    )
    mixes = preempts = False

    def __init__(self, limits: Limits, table: RequestTable, kv_cache: KVCache, options: Any) -> None:
        super().__init__(limits, table, kv_cache, options)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        """Requests of later batches."""
        return len(self.waiting)

    def add(self, request: Request) -> None:
        """To a later batch."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Forget it, wherever it is."""
        (self.waiting if request in self.waiting else self.running).remove(request)

    def clear(self) -> None:
        """Empty queue, nobody runs."""
        self.waiting.clear()
        self.running.clear()

    def schedule(self) -> Schedule | None:
        """All prompts first, in chunks of the step's budget; then one token a request and step."""
        if not self.running:
            self._fill()
        rows = self.rows_of(self.running)
        needs = self.table.needs(rows)
        if (needs > 1).any():
            needs[needs == 1] = 0  # together: nobody decodes while a prompt is part-way
        before = np.cumsum(needs) - needs
        num_tokens = np.clip(self.limits.max_batch_tokens - before, 0, needs)
        busy = num_tokens > 0
        return Schedule(rows[busy], num_tokens[busy]) if busy.any() else None

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_num_seqs and self.table.free_rows:
            request = self.waiting[0]
            row = np.array([self.admit(request)])
            if not self.kv_cache.allocate(row, self.table.last[row]):
                self.retract(request)
                break
            self.running.append(self.waiting.popleft())
