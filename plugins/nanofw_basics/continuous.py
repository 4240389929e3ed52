"""Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024).

Requests join and leave between any two steps. A prompt that exceeds the step's budget of tokens is computed in chunks,
mixed with the decode tokens of the others, so nobody's next token waits for somebody else's long prompt.

A request waits while its beginning is being computed for another one, until it can be found; those behind it go ahead
(after the in-batch prefix caching of SGLang, Zheng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from nanofw.scheduler import Limits, Schedule, Scheduler
from nanofw_basics.policies import ADMISSIONS, ORDERS, VICTIMS
from nanofw_basics.waiting import WaitingLine

if TYPE_CHECKING:
    from nanofw.kv_cache import KVCache
    from nanofw.request import Request
    from nanofw.table import IntArray, RequestTable


PASSED_OVER = 32
"""Requests that may be passed over in one step, since each costs a look into the cache."""


class ContinuousScheduler(Scheduler):
    """Admits in the order of one policy and puts back by another when blocks run out, to be recomputed later.

    The request that has run longest is never a victim, and alone it always fits (the engine has seen to that), so every
    step brings some request nearer to its end.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """Names of policies in `nanofw_basics.policies`: whom to admit first, whom to put back, when to admit."""

        order: Literal["fcfs", "shortest", "priority"] = "fcfs"
        victim: Literal["last-come", "least-lost"] = "last-come"
        admission: Literal["prompt", "reserve"] = "prompt"

    def __init__(self, limits: Limits, table: RequestTable, kv_cache: KVCache, options: Options) -> None:
        super().__init__(limits, table, kv_cache, options)
        self.order, self.victim = ORDERS[options.order], VICTIMS[options.victim]
        self.admission = ADMISSIONS[options.admission]
        self.waiting = WaitingLine(self.order)
        self.running: list[Request] = []  # oldest first
        self._rows = self.rows_of(())
        self._refused: tuple[Request | None, int] = (None, 0)  # who found no room, and how many blocks were free

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self.waiting)

    def add(self, request: Request) -> None:
        """Wait for its turn."""
        self.waiting.join(request)

    def abort(self, request: Request) -> None:
        """Forget it, wherever it is."""
        self.waiting.leave(request)
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
            victim = self.running[self.victim(self.running, self.table) if len(self.running) > 1 else 0]
            self.retract(victim)
            victim.preemptions += 1
            self._leave([victim])
            self.waiting.join(victim)
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
        held: list[Request] = []
        tokens: list[int] = []
        most = min(self.limits.max_num_seqs - len(self.running), self.table.free_rows)
        while self.waiting and budget > 0 and len(admitted) + len(held) < most and len(held) < PASSED_OVER:
            request, free = self.waiting.first(), self.kv_cache.free_blocks
            if self.running and request is self._refused[0] and free <= self._refused[1]:
                break
            row = self.admit(request)
            if self.kv_cache.worth_waiting(row):
                self.retract(request)
                self.waiting.leave(request)
                held.append(request)
                continue
            here = np.array([row])
            chunk = min(int(self.table.needs(here)[0]), budget)
            fits = not self.running or self.admission(self.table, self.kv_cache, self.rows_of(self.running), row)
            if not (fits and self.kv_cache.allocate(here, self.table.computed[here] + chunk)):
                self.retract(request)
                self._refused = (request, free)
                break
            self.waiting.leave(request)
            self.running.append(request)
            admitted.append(request)
            tokens.append(chunk)
            budget -= chunk
        for request in held:
            self.waiting.join(request)
        if not admitted:
            return rows, num_tokens
        self._rows = self.rows_of(self.running)
        return np.append(rows, self.rows_of(admitted)), np.append(num_tokens, np.array(tokens))

    def _leave(self, requests: Sequence[Request]) -> None:
        leaving = set(requests)
        self._refused = (None, 0)
        self.running = [r for r in self.running if r not in leaving]
        self._rows = self.rows_of(self.running)
