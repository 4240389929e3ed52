"""Policies of the continuous scheduler: small functions, each of which can be swapped alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nanofw.kv_cache import KVCache
    from nanofw.request import Request
    from nanofw.table import IntArray, RequestTable

Order = Callable[["Request"], tuple[int, ...]]
"""Whom to admit first: a key, the smallest first, that ends in the request's number, so that no two are equal."""

Victim = Callable[["Sequence[Request]", "RequestTable"], int]
"""Whom to put back when blocks run out: an index into the running requests, oldest first. Never 0: one must go on."""

Admission = Callable[["RequestTable", "KVCache", "IntArray", int], bool]
"""Whether to admit the request in a row (the last argument) beside those that run in other rows."""

WINDOW = 64
"""Requests that may be reordered by length: nobody is overtaken by as many as this."""


def first_come(request: Request) -> tuple[int, ...]:
    """In the order of arrival."""
    return (request.number,)


def shortest_first(request: Request) -> tuple[int, ...]:
    """The shortest prompt among those that arrived together: less waiting on average, and no starvation."""
    return (request.number // WINDOW, request.length, request.number)


def by_priority(request: Request) -> tuple[int, ...]:
    """The most urgent, strictly: while more urgent ones keep coming, the others wait."""
    return (request.params.priority, request.number)


def last_come(running: Sequence[Request], table: RequestTable) -> int:
    """The youngest: those who came before it are nearer to their end."""
    return len(running) - 1


def least_lost(running: Sequence[Request], table: RequestTable) -> int:
    """The one with the fewest tokens to compute again; of equals the youngest."""
    computed = table.computed[np.array([r.row for r in running[:0:-1]])]
    return len(running) - 1 - int(computed.argmin())


def prompt_fits(table: RequestTable, cache: KVCache, others: IntArray, row: int) -> bool:
    """All tokens that the request has, and one more, fit now: else the next steps would only put it back."""
    size = cache.block_size
    return bool(cache.blocks_for(int(table.length[row]) + 1) - table.computed[row] // size <= cache.free_blocks)


def all_fits(table: RequestTable, cache: KVCache, others: IntArray, row: int) -> bool:
    """All that the request and those that run may still grow to fits: nobody is ever put back, and fewer run."""
    size = cache.block_size
    growth = -(-table.last[others] // size) + -table.computed[others] // size
    own = cache.blocks_for(int(table.last[row])) - table.computed[row] // size
    return bool(own + growth.sum() <= cache.free_blocks)


ORDERS: Mapping[str, Order] = {"fcfs": first_come, "shortest": shortest_first, "priority": by_priority}
VICTIMS: Mapping[str, Victim] = {"last-come": last_come, "least-lost": least_lost}
ADMISSIONS: Mapping[str, Admission] = {"prompt": prompt_fits, "reserve": all_fits}
