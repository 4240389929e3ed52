"""The books of a KV cache: emptied whatever has happened, checked by a check that sees, and small."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest

from nanofw.batch import NULL_BLOCK
from nanofw.testing.kv_cache_base import LAYER, KVCacheBase


class KVCacheBooks(KVCacheBase):
    """Its books are right, whatever has happened."""

    def test_clear(self) -> None:
        """Whatever was going on: afterwards all is free, no row holds anything, and nothing is found again.

        Fails if something of an interrupted call survives. Source: the contract.
        """
        cache = self.build(16, num_blocks=9)
        start, longest = cache.free_blocks, min(40, self.max_blocks * 16)
        rows, lengths = np.array([0, 2]), np.array([longest, 16])
        for row in rows:
            cache.match_prefix(int(row), [int(row)] * 40)
        assert cache.allocate(rows, lengths)
        cache.commit(rows, lengths, lambda row: [row] * 40)
        cache.free(2)
        cache.block_table[1] = 3  # what an interrupted call may leave
        cache.clear()
        cache.check_integrity()
        assert cache.free_blocks == start
        assert not cache.block_table.any()
        assert cache.match_prefix(0, [0] * 40) == 0
        assert cache.allocate(np.array([0]), np.array([longest]))
        cache.check_integrity()

    def test_recover(self) -> None:
        """After a call that broke off: all is free and no row holds anything; what is found again has its content.

        Fails if blocks are found that had not been committed. Source: the contract.
        """
        cache = self.build(4, num_blocks=9)
        start, tokens = cache.free_blocks, [5] * min(12, self.max_blocks * 4)
        row, length = np.array([0]), np.array([len(tokens)])
        cache.match_prefix(0, tokens)
        assert cache.allocate(row, length)
        for position in range(len(tokens)):
            self.write(cache, 0, position, position + 1.0)
        cache.commit(row, length - 4, lambda _: tokens)
        cache.match_prefix(1, [6])
        assert cache.allocate(np.array([1]), np.array([1]))
        cache.block_table[2] = 3  # what an interrupted call may leave
        cache.recover()
        cache.check_integrity()
        assert cache.free_blocks == start
        assert not cache.block_table.any()
        found = cache.match_prefix(3, [*tokens, 1])
        assert found <= len(tokens) - 4, "found what had never been committed"
        assert [self.read(cache, 3, position) for position in range(found)] == [n + 1.0 for n in range(found)]
        assert not cache.worth_waiting(3)
        cache.check_integrity()

    def test_bookkeeping_is_small(self) -> None:
        """Memory beside the slots, after every block has been used and committed: at most `bookkeeping` bytes each.

        Fails for an index that keeps an object a token, or never forgets a block. Source: our own limit, since a pool
        may have a million blocks.
        """
        blocks = 4096
        tracemalloc.start()
        try:
            cache = self.build(1, blocks + 1, 2, self.max_blocks, (dataclasses.replace(LAYER, head_size=1),))
            for number in range(min(2 * blocks // self.max_blocks + 1, 100)):
                tokens = [number, *range(cache.block_table.shape[1] - 1)]
                cache.match_prefix(0, tokens)
                assert cache.allocate(np.array([0]), np.array([len(tokens)]))
                cache.commit(np.array([0]), np.array([len(tokens)]), lambda _, known=tokens: known)  # type: ignore[misc]
                cache.free(0)
            traced, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        slots = sum(layer.key.nbytes + layer.value.nbytes for layer in cache.layers)
        token_ids = 4 * blocks
        assert (traced - slots - token_ids) / blocks <= self.bookkeeping

    @pytest.mark.parametrize("damage", ["stolen", "leaked", "tail"])
    def test_check_integrity_finds(self, damage: str) -> None:
        """`check_integrity` is what tests rely on: a block owned twice, lost, or named beyond the end is found.

        Fails if it lets one of them pass: then no other check can be believed. Source: the contract.
        """
        cache, blocks = self.build(4, num_blocks=9), min(2, self.max_blocks)
        rows = np.array([0, 1])
        for row, token in enumerate((1, 2)):
            cache.match_prefix(row, [token] * 4 * blocks)
        assert cache.allocate(rows, np.array([4, 4]) * blocks)
        cache.check_integrity()
        if damage == "stolen":
            cache.block_table[0, 0] = cache.block_table[1, 0]
        elif damage == "leaked":
            cache.block_table[0, blocks - 1] = NULL_BLOCK
        else:
            self.needs_blocks(3)
            cache.block_table[0, 2] = max(set(range(1, 9)) - set(cache.block_table[:2].flat))
        with pytest.raises(AssertionError):
            cache.check_integrity()
