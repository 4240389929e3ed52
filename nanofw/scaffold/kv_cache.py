"""My own KV cache.

Begin at `allocate`: in Python, it looks at every request at every step, and hands out blocks one by one. Then look at
`match_prefix` in `nanofw/kv_cache.py`: this cache never finds a prefix that an earlier request has computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import nanofw
from nanofw import NULL_BLOCK, CountLaw, KVCache, KVCacheSpec, LayerKV, ScalingLaw


class MyKVCache(KVCache):
    """Fixed-size blocks from one pool; a list of those that are free."""

    # What a step costs, which is held to it. Python that runs for each of the B requests is what to remove.
    laws = (
        CountLaw("python_calls", grows_with=("B",)),
        CountLaw("aten_calls"),
        CountLaw("launches"),
        CountLaw("host_reads"),
        ScalingLaw(at_least=4.0),
    )

    @dataclass(frozen=True, slots=True)
    class Options:
        """What a user may set: `--option kv_cache.block_size=32`."""

        block_size: int = 16

    @classmethod
    def block_slots(cls, spec: KVCacheSpec, options: Any) -> int:
        """Slots a block."""
        return int(options.block_size)

    @classmethod
    def block_bytes(cls, spec: KVCacheSpec, options: Any) -> int:
        """K and V of a block's tokens, in all layers."""
        token = sum(2 * layer.num_kv_heads * layer.head_size for layer in spec.layers) * spec.dtype.itemsize
        return token * int(options.block_size)

    def __init__(self, spec: KVCacheSpec, options: Any) -> None:
        self.options, self.block_size, self.num_blocks = options, options.block_size, spec.num_blocks
        self.layers = []
        for index, layer in enumerate(spec.layers):
            shape = (2, spec.num_blocks, self.block_size, layer.num_kv_heads, layer.head_size)
            key, value = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
            self.layers.append(LayerKV(index, layer, key, value, self.block_size))
        self.block_table = np.zeros((spec.rows, self.blocks_for(spec.max_len)), dtype=np.int32)
        self.clear()

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    def allocate(self, rows: Any, lengths: Any) -> bool:
        """Room for `lengths[i]` tokens in each row: all of it, or nothing."""
        lacking = [max(self.blocks_for(int(n)) - self._held[r], 0) for r, n in zip(rows, lengths, strict=True)]
        if sum(lacking) > len(self._free):
            return False
        for row, count in zip(rows, lacking, strict=True):
            for _ in range(count):
                self.block_table[row, self._held[row]] = self._free.pop()
                self._held[row] += 1
        return True

    def free(self, row: int) -> None:
        """Give back all that `row` holds."""
        self._free += reversed(self.block_table[row, : self._held[row]].tolist())
        self.block_table[row], self._held[row] = NULL_BLOCK, 0

    def clear(self) -> None:
        """Nobody holds anything."""
        self.block_table[:] = NULL_BLOCK
        self._held = [0] * len(self.block_table)
        self._free = list(range(self.num_blocks - 1, NULL_BLOCK, -1))

    def check_integrity(self) -> None:
        """Every block but the null block is free or held, once. Tests call it; a step does not."""
        named = self.block_table[self.block_table != NULL_BLOCK].tolist()
        assert sorted(named + self._free) == list(range(NULL_BLOCK + 1, self.num_blocks)), "lost, or owned twice"
        assert [np.count_nonzero(row) for row in self.block_table] == self._held, "a row names what it does not hold"


nanofw_api = (1, 0)


@nanofw.hookimpl
def nanofw_register_kv_cache(register: Any) -> None:
    """Tell nanofw the name."""
    register("my-kv-cache", MyKVCache)
