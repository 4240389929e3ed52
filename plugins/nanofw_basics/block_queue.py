"""Blocks that nobody holds, in the order in which they will be used: a linked list in two arrays."""

from __future__ import annotations

import numpy as np

from nanofw.batch import NULL_BLOCK

END = NULL_BLOCK
"""The null block is never queued, so its links hold the first and the last block of the list."""


class BlockQueue:
    """Each operation costs the same however long the queue is; 8 bytes a block.

    Args:
        num_blocks: blocks in the pool, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._next, self._previous = np.zeros((2, num_blocks), dtype=np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def fill(self) -> None:
        """All blocks, the lowest first."""
        size = len(self._next)
        self._next[:] = np.roll(np.arange(size), -1)
        self._previous[:] = np.roll(np.arange(size), 1)
        self._count = size - 1

    def push(self, block: int, *, first: bool) -> None:
        """Put a block at the end, or in front."""
        before, after = (END, int(self._next[END])) if first else (int(self._previous[END]), END)
        self._link(before, block)
        self._link(block, after)
        self._count += 1

    def pop(self) -> int:
        """Take the first block."""
        block = int(self._next[END])
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Take a block out, wherever it is."""
        self._link(int(self._previous[block]), int(self._next[block]))
        self._count -= 1

    def blocks(self) -> list[int]:
        """All of them, in order. For tests."""
        found: list[int] = []
        block = int(self._next[END])
        while block != END and len(found) <= self._count:
            found.append(block)
            block = int(self._next[block])
        assert len(found) == self._count, f"{self._count} blocks counted, {len(found)} linked"
        return found

    def _link(self, before: int, after: int) -> None:
        self._next[before], self._previous[after] = after, before
