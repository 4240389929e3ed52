"""KV cache in fixed-size blocks from one pool (vLLM's PagedAttention, Kwon et al., SOSP 2023).

A request's tokens lie in blocks that need not be neighbours; its block table names them in order. Nothing is reserved
for tokens that may never come, and at most one block a request is partly empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanofw.batch import NULL_BLOCK
from nanofw.kv_cache import KVCache, KVCacheSpec, LayerKV

if TYPE_CHECKING:
    from nanofw.table import IntArray


class PagedKVCache(KVCache):
    """Block tables over a pool, with a stack of free blocks. Growing all requests is a few array operations."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """block_size: slots a block."""

        block_size: int = 16

        def __post_init__(self) -> None:
            if self.block_size < 1:
                raise ValueError(f"block_size must be at least 1, got {self.block_size}")

    options: Options

    @classmethod
    def block_bytes(cls, spec: KVCacheSpec, options: Options) -> int:
        """K and V of `block_size` tokens in every layer."""
        per_token = sum(2 * layer.num_kv_heads * layer.head_size for layer in spec.layers)
        return per_token * options.block_size * spec.dtype.itemsize

    @classmethod
    def block_slots(cls, spec: KVCacheSpec, options: Options) -> int:
        """`block_size`."""
        return options.block_size

    def __init__(self, spec: KVCacheSpec, options: Options) -> None:
        self.spec, self.options = spec, options
        self.block_size, self.num_blocks = options.block_size, spec.num_blocks
        self.layers = [self._layer(index) for index in range(len(spec.layers))]
        columns = min(self.blocks_for(spec.max_len), max(self.num_blocks - 1, 1))
        self.block_table = np.empty((spec.rows, columns), dtype=np.int32)
        self._held, self._room = np.empty((2, spec.rows), dtype=np.int64)  # in blocks, in slots
        # A stack: the block given back last is the first to be used again, while it may still be in a processor cache.
        self._free = np.empty(self.num_blocks - 1, dtype=np.int32)
        self.clear()

    @property
    def free_blocks(self) -> int:
        """Blocks on the stack."""
        return self._num_free

    def allocate(self, rows: IntArray, lengths: IntArray) -> bool:
        """Give each row the blocks it lacks, all or nothing."""
        short = (lengths > self._room[rows]).nonzero()[0]
        if not len(short):  # many a decode step
            return True
        rows, lengths = rows[short], lengths[short]
        held = self._held[rows]
        lacking = -(-lengths // self.block_size) - held
        total = int(lacking.sum())
        if total > self.free_blocks:
            return False
        owner = np.repeat(np.arange(len(rows)), lacking)
        nth = np.arange(total) - np.repeat(np.cumsum(lacking) - lacking, lacking)
        self.block_table[rows[owner], held[owner] + nth] = self._take(total)
        self._held[rows] = held + lacking
        self._room[rows] = (held + lacking) * self.block_size
        return True

    def free(self, row: int) -> None:
        """Push the row's blocks back, the last one first."""
        count = int(self._held[row])
        self._free[self._num_free : self._num_free + count] = self.block_table[row, :count][::-1]
        self._num_free += count
        self.block_table[row, :count] = NULL_BLOCK
        self._held[row] = self._room[row] = 0

    def clear(self) -> None:
        """A full stack, the lowest block on top."""
        self.block_table[:] = NULL_BLOCK
        self._held[:] = self._room[:] = 0
        self._free[:] = np.arange(self.num_blocks - 1, NULL_BLOCK, -1)
        self._num_free = len(self._free)

    def check_integrity(self) -> None:
        """Every block but the null block is free or owned, exactly once; tails of the table are null."""
        owned = [self.block_table[row, : self._held[row]] for row in range(self.spec.rows)]
        everything = np.sort(np.concatenate([self._free[: self._num_free], *owned]))
        expected = np.arange(NULL_BLOCK + 1, self.num_blocks)
        assert np.array_equal(everything, expected), f"blocks lost or owned twice: {everything} is not {expected}"
        for row in range(self.spec.rows):
            tail = self.block_table[row, self._held[row] :]
            assert (tail == NULL_BLOCK).all(), f"row {row} names blocks beyond the {self._held[row]} it holds: {tail}"

    def _take(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Blocks from the top of the stack; there must be enough."""
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1]

    def _layer(self, index: int) -> LayerKV:
        layer = self.spec.layers[index]
        shape = (self.num_blocks, self.block_size, layer.num_kv_heads, layer.head_size)
        key, value = (_zeros(shape, self.spec.dtype, self.spec.device) for _ in "kv")
        return LayerKV(index, layer, key, value, self.block_size)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not whatever memory held: a masked slot must not turn 0 * NaN into a result."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages, which come when they are first used; torch would write them all now.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
