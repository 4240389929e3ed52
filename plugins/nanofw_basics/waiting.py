"""Requests that wait, in the order of a policy."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanofw.request import Request
    from nanofw_basics.policies import Order


class WaitingLine:
    """A heap. Who leaves from the middle is only crossed out, so a step costs the same however many wait.

    Args:
        order: the policy; asked once, when a request joins.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap: list[tuple[tuple[int, ...], Request]] = []
        self._waiting: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def join(self, request: Request) -> None:
        """Wait for one's turn."""
        heapq.heappush(self._heap, (self._order(request), request))
        self._waiting.add(request)

    def first(self) -> Request:
        """Whose turn it is. There must be somebody."""
        return self._heap[0][1]

    def leave(self, request: Request) -> None:
        """Admitted, or aborted; nothing happens if it does not wait."""
        self._waiting.discard(request)
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)

    def clear(self) -> None:
        """All leave."""
        self._waiting.clear()
        self._heap.clear()
