"""Contract of a scheduler: which requests compute how many tokens in the next step.

A scheduler decides on lengths, never on token values, so it can plan a step before the previous one has finished.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nanofw.component import Component

if TYPE_CHECKING:
    from nanofw.kv_cache import KVCache
    from nanofw.request import Request
    from nanofw.table import IntArray, RequestTable


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a step.

    Attributes:
        max_num_seqs: most requests.
        max_batch_tokens: most tokens.
    """

    max_num_seqs: int
    max_batch_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The next step.

    Attributes:
        rows: `[B]` int64, whose tokens are computed; no row twice.
        num_tokens: `[B]` int64, how many of each, at least 1.
        preempted: requests that were put back to make room.
    """

    rows: IntArray
    num_tokens: IntArray
    preempted: Sequence[Request] = ()


class Scheduler(Component):
    """Decides on each step. `schedule` returns only what fits: it has allocated the blocks.

    The engine moves `table.computed` and `table.length` forward once a schedule is returned, and calls `update` with
    the requests that ended. Blocks and rows of ended and aborted requests are given back by the engine.

    Class attributes a plugin declares:
        mixes: a long prompt is computed in chunks while others keep decoding.
        preempts: requests are put back when blocks run out; else it reserves what they need.

    Args:
        limits: bounds on a step.
        table: the running requests, read for their lengths.
        kv_cache: asked for blocks.
        options: an instance of its `Options`.
    """

    mixes: ClassVar[bool] = True
    preempts: ClassVar[bool] = True

    def __init__(self, limits: Limits, table: RequestTable, kv_cache: KVCache, options: Any) -> None:
        self.limits, self.table, self.kv_cache, self.options = limits, table, kv_cache, options

    @abstractmethod
    def add(self, request: Request) -> None:
        """Take a new request. The engine has checked that it can fit when it is alone."""

    @abstractmethod
    def abort(self, request: Request) -> None:
        """Forget a request, waiting or running."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all requests, whatever an interrupted call has left. The engine adds them again."""

    @abstractmethod
    def schedule(self) -> Schedule | None:
        """The next step, or None if nothing can be computed before a step in flight returns."""

    def update(self, finished: Sequence[Request]) -> None:
        """A step has returned; `finished` ended with it. Called after their rows were given back."""
        for request in finished:
            self.abort(request)

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests that hold no row."""

    def admit(self, request: Request) -> int:
        """Give `request` a row, and what the cache has of its tokens. Returns the row."""
        row = self.table.open(request)
        known = int(self.table.known[row])
        leader, cached = request.leader, 0
        fresh = leader is not request and not request.output_ids
        if fresh and leader.row >= 0 and self.table.computed[leader.row] >= known - 1:  # it may have been put back
            cached = self.kv_cache.fork(leader.row, row, known - 1)
        if not cached:  # a prompt whose logits are wanted is computed from its first token on
            offered = 1 if self.table.scored[row] else known
            cached = self.kv_cache.match_prefix(row, self.table.tokens[row, :offered])
        self.table.computed[row] = cached
        if not request.preemptions:
            request.cached_tokens = cached
        return row

    def retract(self, request: Request) -> None:
        """Undo `admit`, or preempt: the request keeps its known tokens and will be computed again."""
        self.kv_cache.free(self.table.close(request))

    @staticmethod
    def rows_of(requests: Sequence[Request]) -> IntArray:
        """Their rows as an array."""
        return np.fromiter((r.row for r in requests), dtype=np.int64, count=len(requests))
