"""My own scheduler.

Begin at `_admit`: a request comes in only when there is room for the longest it can become, so blocks lie idle that
others could use. `nanofw/scheduler.py` has the contract; whoever admits more must `retract` somebody when blocks run
out.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

import nanofw
from nanofw import CountLaw, Request, ScalingLaw, Schedule, Scheduler

nanofw_api = (1, 0)


class MyScheduler(Scheduler):
    """First come, first served. Long prompts are computed in chunks, beside the next tokens of the others."""

    # What a step costs, which is held to it. Python that runs for each of the B requests is what to remove.
    laws = (
        CountLaw("python_calls", grows_with=("B",)),
        CountLaw("aten_calls"),
        CountLaw("launches"),
        CountLaw("host_reads"),
        ScalingLaw(at_least=4.0),
    )
    preempts = False  # it reserves what a request can need, so it never puts one back

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row."""
        return len(self.waiting)

    def add(self, request: Request) -> None:
        """Take a new request."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        line: Any = self.waiting if request in self.waiting else self.running
        line.remove(request)

    def clear(self) -> None:
        """Forget all."""
        self.waiting.clear()
        self.running.clear()

    def schedule(self) -> Schedule | None:
        """The next step: tokens in decode first, then as much of the prompts as the budget allows."""
        self._admit()
        rows = self.rows_of(self.running)
        needs = self.table.needs(rows)  # tokens that each row can compute now: 1 in decode, more in a prompt
        order = np.argsort(needs > 1, kind="stable")
        rows, needs = rows[order], needs[order]
        before = np.cumsum(needs) - needs
        num_tokens = np.clip(self.limits.max_batch_tokens - before, 0, needs)
        busy = num_tokens > 0
        return Schedule(rows[busy], num_tokens[busy]) if busy.any() else None

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_num_seqs and self.table.free_rows:
            request = self.waiting[0]
            row = np.array([self.admit(request)])
            if not self.kv_cache.allocate(row, self.table.last[row]):  # all that it can ever need
                self.retract(request)
                break
            self.running.append(self.waiting.popleft())


@nanofw.hookimpl
def nanofw_register_scheduler(register: Any) -> None:
    """Tell nanofw the name."""
    register("my-scheduler", MyScheduler)
