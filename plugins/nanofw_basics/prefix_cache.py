"""KV cache that remembers: a request whose tokens begin like an earlier one's takes over the blocks that are there.

After RadixAttention (SGLang, Zheng et al., 2024) and vLLM's automatic prefix caching. A full block is *published* under
the block before it and its own tokens, once they have been computed; blocks that nobody holds any more stay published
until their slots are needed, the least recently used first, a request's last block before its first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nanofw.batch import NULL_BLOCK
from nanofw.kv_cache import KVCacheSpec
from nanofw_basics.block_index import BlockIndex
from nanofw_basics.block_queue import BlockQueue
from nanofw_basics.paged_cache import PagedKVCache

if TYPE_CHECKING:
    from nanofw.table import IntArray, TokenIds


Key = tuple[int, bytes]
"""A block's content: the serial of the block before it, and its tokens."""


class PrefixKVCache(PagedKVCache):
    """A paged cache with reference counts, an index of published blocks, and a queue of blocks that nobody holds."""

    shares_prefixes = True

    def __init__(self, spec: KVCacheSpec, options: PagedKVCache.Options) -> None:
        self._queue = BlockQueue(spec.num_blocks)
        self._index = BlockIndex(spec.num_blocks, options.block_size)
        self._owners = np.zeros(spec.num_blocks, dtype=np.int32)
        self._published, self._last = np.zeros((2, spec.rows), dtype=np.int64)  # blocks of a row, serial of the last
        self._borrowed = np.zeros(spec.rows, dtype=bool)  # rows that may not write into their last block
        # The whole block of its prompt that each row computes next, and the first row to compute it.
        self._next: list[Key | None] = [None] * spec.rows
        self._filling: dict[Key, int] = {}
        super().__init__(spec, options)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, published or not."""
        return len(self._queue)

    def match_prefix(self, row: int, token_ids: TokenIds) -> int:
        """Take over the published blocks that hold the beginning of `token_ids`, all but its last token at most."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        found: list[int] = []
        serial = 0
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            block = self._index.find(serial, tokens[start : start + self.block_size])
            if block == NULL_BLOCK:
                break
            serial = self._index.serial(block)
            found.append(block)
        for block in found:
            if not self._owners[block]:
                self._queue.remove(block)
            self._owners[block] += 1
        self._hold(row, found)
        self._published[row], self._last[row] = len(found), serial
        self._fills(row, tokens)
        return len(found) * self.block_size

    def worth_waiting(self, row: int) -> bool:
        """Whether an earlier row fills the next block. Of twins the first one computes, after SGLang's scheduler."""
        key = self._next[row]
        return key is not None and self._filling.get(key, row) != row

    def fork(self, source: int, row: int, length: int) -> int:
        """Share the source's blocks. A last one that is not full is copied when `row` is about to grow in it."""
        count = self.blocks_for(length)
        blocks = self.block_table[source, :count]
        self._owners[blocks] += 1
        self._hold(row, blocks.tolist())
        self._borrowed[row] = length % self.block_size > 0
        self._room[row] = length // self.block_size * self.block_size
        self._published[row] = self._last[row] = 0  # found again one by one, in commit
        return length

    def allocate(self, rows: IntArray, lengths: IntArray) -> bool:
        """Copy borrowed blocks that are to be written to, and give each row what it lacks: all, or nothing."""
        writers = rows[self._borrowed[rows] & (lengths > self._room[rows])]
        if len(writers):
            lacking = np.maximum(-(-lengths // self.block_size) - self._held[rows], 0).sum()
            if lacking + len(writers) > self.free_blocks:
                return False
            for row in writers.tolist():
                self._copy_last(row)
        return super().allocate(rows, lengths)

    def commit(self, rows: IntArray, lengths: IntArray, tokens_of: Callable[[int], TokenIds]) -> None:
        """Publish the blocks that have become full. One that another request has published meanwhile stays private."""
        full = lengths // self.block_size
        begun = self._published[rows]
        due = (full > begun).nonzero()[0]
        for row, first, end in zip(rows[due].tolist(), begun[due].tolist(), full[due].tolist(), strict=True):
            tokens, serial = np.asarray(tokens_of(row), dtype=np.int32), int(self._last[row])
            for nth, block in enumerate(self.block_table[row, first:end].tolist(), first):
                serial = self._index.publish(block, serial, tokens[nth * self.block_size : (nth + 1) * self.block_size])
            self._published[row], self._last[row] = end, serial
            if self._next[row] is not None:
                self._fills(row, tokens)

    def free(self, row: int) -> None:
        """Let go of the row's blocks. What is published is kept for later; the rest is used again first."""
        for block in self.block_table[row, : self._held[row]][::-1].tolist():
            self._let_go(block)
        self._hold(row, [])
        self._borrowed[row] = False
        self._fills(row, ())

    def clear(self) -> None:
        """Nothing is held, nothing is published."""
        self._index.clear()
        self.recover()

    def recover(self) -> None:
        """Nothing is held. Published blocks stay: nobody writes into them, so no broken step can have spoiled them."""
        super().clear()
        self._queue.fill(self._index.rebuild())
        self._owners[:] = 0
        self._published[:] = self._last[:] = 0
        self._borrowed[:] = False
        self._next[:] = [None] * self.spec.rows
        self._filling.clear()

    def check_integrity(self) -> None:
        """Each block is in the queue or held, by as many rows as it counts; published ones can be found."""
        owners = np.zeros_like(self._owners)
        for row in range(self.spec.rows):
            held = int(self._held[row])
            mine, tail = self.block_table[row, :held], self.block_table[row, held:]
            assert (mine != NULL_BLOCK).all(), f"row {row} holds the null block: {mine}"
            assert len(set(mine.tolist())) == held, f"row {row} holds a block twice: {mine}"
            assert (tail == NULL_BLOCK).all(), f"row {row} names blocks beyond the {held} it holds: {tail}"
            owners[mine] += 1
        assert np.array_equal(owners, self._owners), f"reference counts {self._owners} are not {owners}"
        unowned = (owners[NULL_BLOCK + 1 :] == 0).nonzero()[0] + NULL_BLOCK + 1
        queued = self._queue.blocks()
        assert sorted(queued) == unowned.tolist(), f"blocks lost or owned twice: {queued} is not {unowned}"
        self._index.check_integrity()

    def _take(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        blocks = self._queue.take(count)
        for block in blocks:
            self._index.drop(block)
        self._owners[blocks] = 1
        return np.array(blocks, dtype=np.int32)

    def _copy_last(self, row: int) -> None:
        last = int(self._held[row]) - 1
        (new,), old = self._take(1).tolist(), int(self.block_table[row, last])
        for layer in self.layers:
            layer.key[new].copy_(layer.key[old])
            layer.value[new].copy_(layer.value[old])
        self.block_table[row, last] = new
        self._let_go(old)
        self._borrowed[row] = False
        self._room[row] = (last + 1) * self.block_size

    def _let_go(self, block: int) -> None:
        self._owners[block] -= 1
        if not self._owners[block]:
            self._queue.push(block, first=not self._index.serial(block))

    def _fills(self, row: int, token_ids: TokenIds) -> None:
        """Note which block of `token_ids` the row computes next. One that ends with them could not be found."""
        if (old := self._next[row]) is not None and self._filling.get(old) == row:
            del self._filling[old]
        start, self._next[row] = int(self._published[row]) * self.block_size, None
        if start + self.block_size < len(token_ids):
            block = np.asarray(token_ids[start : start + self.block_size], dtype=np.int32)
            key = self._next[row] = (int(self._last[row]), block.tobytes())
            self._filling.setdefault(key, row)

    def _hold(self, row: int, blocks: Sequence[int]) -> None:
        self.block_table[row, : self._held[row]] = NULL_BLOCK
        self.block_table[row, : len(blocks)] = blocks
        self._held[row], self._room[row] = len(blocks), len(blocks) * self.block_size
