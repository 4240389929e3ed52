"""Blocks that nobody holds, in the order in which they will be used: a linked list in two arrays.

Single elements of an `array` are read several times as fast as those of a numpy array.
"""

from __future__ import annotations

from array import array

import numpy as np

from nanofw.batch import NULL_BLOCK
from nanofw_basics.block_index import Blocks

END = NULL_BLOCK
"""The null block is never queued, so its links hold the first and the last block of the list."""


class BlockQueue:
    """Each operation costs the same however long the queue is; 8 bytes a block.

    Args:
        num_blocks: blocks in the pool, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._next, self._previous = (array("i", bytes(4 * num_blocks)) for _ in range(2))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def fill(self, blocks: Blocks) -> None:
        """All blocks, in this order."""
        ring = np.append(END, blocks)
        np.frombuffer(self._next, dtype=np.int32)[ring] = np.roll(ring, -1)
        np.frombuffer(self._previous, dtype=np.int32)[ring] = np.roll(ring, 1)
        self._count = len(blocks)

    def push(self, block: int, *, first: bool) -> None:
        """Put a block at the end, or in front."""
        before, after = (END, self._next[END]) if first else (self._previous[END], END)
        self._link(before, block)
        self._link(block, after)
        self._count += 1

    def take(self, count: int) -> list[int]:
        """Take the first blocks; there must be so many."""
        taken, block = [], END
        for _ in range(count):
            block = self._next[block]
            taken.append(block)
        self._link(END, self._next[block])
        self._count -= count
        return taken

    def remove(self, block: int) -> None:
        """Take a block out, wherever it is."""
        self._link(self._previous[block], self._next[block])
        self._count -= 1

    def blocks(self) -> list[int]:
        """All of them, in order. For tests."""
        found: list[int] = []
        block = self._next[END]
        while block != END and len(found) <= self._count:
            found.append(block)
            block = self._next[block]
        assert len(found) == self._count, f"{self._count} blocks counted, {len(found)} linked"
        return found

    def _link(self, before: int, after: int) -> None:
        self._next[before], self._previous[after] = after, before
