"""Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024).

Requests join and leave between any two steps. A prompt that exceeds the step's budget of tokens is computed in chunks,
mixed with the decode tokens of the others, so nobody's next token waits for somebody else's long prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nanofw.scheduler import Limits, Schedule, Scheduler

if TYPE_CHECKING:
    from nanofw.kv_cache import KVCache
    from nanofw.request import Request
    from nanofw.table import IntArray, RequestTable


class ContinuousScheduler(Scheduler):
    """First come, first served; when blocks run out, the request that came last is put back and recomputed later.

    The oldest running request is never a victim, and alone it always fits (the engine has seen to that), so every step
    brings some request nearer to its end.
    """

    def __init__(self, limits: Limits, table: RequestTable, kv_cache: KVCache, options: Any) -> None:
        super().__init__(limits, table, kv_cache, options)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._rows = self.rows_of(())

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self.waiting)

    def add(self, request: Request) -> None:
        """To the end of the queue."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Forget it, wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._leave([request])

    def clear(self) -> None:
        """Empty queue, nobody runs."""
        self.waiting.clear()
        self._leave(self.running)

    def update(self, finished: Sequence[Request]) -> None:
        """Forget the finished ones."""
        if finished:
            self._leave(finished)

    def schedule(self) -> Schedule | None:
        """Running requests first, decode before prefill; then as many waiting ones as budget, rows and blocks allow."""
        rows, num_tokens, preempted = self._schedule_running()
        if self.waiting and not preempted:
            rows, num_tokens = self._admit_waiting(rows, num_tokens)
        return Schedule(rows, num_tokens, preempted) if len(rows) else None

    def _schedule_running(self) -> tuple[IntArray, IntArray, list[Request]]:
        preempted: list[Request] = []
        while True:
            rows = self._rows
            num_tokens = self._within_budget(self.table.needs(rows))
            busy = num_tokens.nonzero()[0]
            if len(busy) < len(rows):
                rows, num_tokens = rows[busy], num_tokens[busy]
            if self.kv_cache.allocate(rows, self.table.computed[rows] + num_tokens):
                return rows, num_tokens, preempted
            victim = self.running[-1]
            self.retract(victim)
            victim.preemptions += 1
            self._leave([victim])
            self.waiting.appendleft(victim)
            preempted.append(victim)

    def _within_budget(self, needs: IntArray) -> IntArray:
        """Decode tokens first, oldest first; what is left of the budget goes to prompts in the same order."""
        budget = self.limits.max_batch_tokens
        if needs.sum() <= budget:
            return needs
        order = np.argsort(needs > 1, kind="stable")
        before = np.cumsum(needs[order]) - needs[order]
        num_tokens = np.empty_like(needs)
        num_tokens[order] = np.clip(budget - before, 0, needs[order])
        return num_tokens

    def _admit_waiting(self, rows: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
        budget = self.limits.max_batch_tokens - int(num_tokens.sum())
        admitted: list[Request] = []
        tokens: list[int] = []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs and self.table.free_rows:
            request = self.waiting[0]
            # All of it must fit now, or the next steps would only put it back (alone, it always fits in the end).
            if self.running and self.kv_cache.blocks_for(request.length + 1) > self.kv_cache.free_blocks:
                break
            row = self.admit(request)
            here = np.array([row])
            chunk = min(int(self.table.needs(here)[0]), budget)
            if not self.kv_cache.allocate(here, self.table.computed[here] + chunk):
                self.retract(request)
                break
            self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
            tokens.append(chunk)
            budget -= chunk
        if not admitted:
            return rows, num_tokens
        self._rows = self.rows_of(self.running)
        return np.append(rows, self.rows_of(admitted)), np.append(num_tokens, np.array(tokens))

    def _leave(self, requests: Sequence[Request]) -> None:
        leaving = set(requests)
        self.running = [r for r in self.running if r not in leaving]
        self._rows = self.rows_of(self.running)
