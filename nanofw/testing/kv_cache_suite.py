"""Conformance suite of KV caches.

Subclass it in a test file, and pytest runs all of it on your cache:

    from nanofw.testing import KVCacheSuite
    from my_plugin import MyCache

    class TestMyCache(KVCacheSuite):
        backend = MyCache

A plain model of what the cache should hold is kept beside it: every token written carries a mark of the whole prefix it
stands for, so a block that two requests share wrongly, or that is handed out while owned, shows as a wrong mark.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from nanofw.batch import NULL_BLOCK
from nanofw.kv_cache import PAGED_NHD, KVCache, KVCacheSpec
from nanofw.options import build_options
from nanofw.testing.count_laws import CountLaws
from nanofw.testing.kv_cache_base import LAYER
from nanofw.testing.kv_cache_books import KVCacheBooks
from nanofw.testing.kv_cache_machine import KVCacheMachine
from nanofw.testing.kv_cache_served import KVCacheServed

BLOCK_SIZES = (1, 3, 16, 256)


class KVCacheSuite(KVCacheBooks, KVCacheServed, CountLaws):
    """No block is lost, owned twice, or written by others."""

    @pytest.mark.parametrize("block_size", [1, 3, 16, 64], ids="bs{}".format)
    def test_conservation(self, block_size: int) -> None:
        """Random lives of requests against a model: no block lost, none owned twice, no content changed by others.

        Fails with the shortest life that breaks one of these. Sources: jjang-ai/vmlx#68 (references never given back),
        nano-vllm#144 and #208 (cached prefixes, blocks hit before they are filled), MinivLLM#77 (lengths that are
        multiples of the block size).
        """
        self.build(block_size, max_len=block_size)  # skip before Hypothesis starts, if at all

        # Made anew for each suite: Hypothesis refuses one test that several classes inherit (differing executors).
        machine = type(
            f"{type(self).__name__}Machine", (KVCacheMachine,), {"suite": type(self), "block_size": block_size}
        )
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.max_examples,
                stateful_step_count=self.steps,
                phases=self.phases,
                report_multiple_bugs=False,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    @pytest.mark.parametrize("block_size", BLOCK_SIZES, ids="bs{}".format)
    def test_lengths_at_block_edges(self, block_size: int) -> None:
        """k*BS - 1, k*BS and k*BS + 1 tokens take k, k and k + 1 blocks, for k = 1..4.

        Fails if a full last block counts as an empty one, or a block too many is taken. Source: MinivLLM#77.
        """
        cache = self.build(block_size, num_blocks=8, rows=1, max_len=6 * block_size)
        free = cache.free_blocks
        for k in range(1, min(self.max_blocks, 4) + 1):
            for length in range(max(k * block_size - 1, 1), min(k, self.max_blocks - 1) * block_size + 2):
                blocks = -(-length // block_size)
                assert cache.blocks_for(length) == blocks
                cache.match_prefix(0, range(length))
                assert cache.allocate(np.array([0]), np.array([length]))
                assert np.count_nonzero(cache.block_table[0]) == blocks, f"{length} tokens"
                assert cache.free_blocks == free - blocks
                cache.free(0)
        assert cache.free_blocks == free

    def test_one_request_can_fill_the_pool(self) -> None:
        """`capacity` is true, and one token more is refused without a trace.

        Fails if a block is kept back, or the null block is handed out: requests are then admitted that never fit.
        Source: vllm#39734.
        """
        self.needs_blocks(8)
        cache = self.build(16, num_blocks=9, rows=2, max_len=1024)
        assert cache.capacity == 8 * 16
        cache.match_prefix(0, range(cache.capacity))
        assert cache.allocate(np.array([0]), np.array([cache.capacity]))
        assert cache.free_blocks == 0
        before = cache.block_table.copy()
        cache.match_prefix(1, [1])
        assert not cache.allocate(np.array([1]), np.array([1]))
        assert np.array_equal(before, cache.block_table)
        cache.check_integrity()

    def test_allocation_is_all_or_nothing(self) -> None:
        """Three requests of which two would fit: none gets a block.

        Fails if a part is kept, of which the caller would never learn. Source: the contract.
        """
        self.needs_blocks(2)
        cache = self.build(16, num_blocks=5, rows=3)
        rows = np.arange(3)
        for row in rows:
            cache.match_prefix(int(row), [int(row)])
        assert not cache.allocate(rows, np.array([32, 32, 1]))
        assert cache.free_blocks == 4
        assert not cache.block_table.any()
        assert cache.allocate(rows, np.array([32, 16, 1]))
        assert cache.free_blocks == 0

    def test_200_requests_give_everything_back(self) -> None:
        """Free blocks after 200 requests == at the start.

        Fails if what has ended still holds a block: the pool shrinks until nobody is admitted. Source:
        jjang-ai/vmlx#68.
        """
        cache = self.build(16, num_blocks=9, rows=4)
        start = cache.free_blocks
        for number in range(200):
            row, length = number % 4, 1 + number * 7 % min(60, self.max_blocks * 16)
            tokens = [number % 3] * length
            cached = cache.match_prefix(row, tokens)
            assert 0 <= cached < length
            assert cache.allocate(np.array([row]), np.array([length]))
            if number % 5:  # every fifth is aborted before it was computed
                cache.commit(np.array([row]), np.array([length]), lambda _, known=tokens: known)  # type: ignore[misc]
            cache.free(row)
            cache.check_integrity()
        assert cache.free_blocks == start

    @pytest.mark.parametrize("block_size", [3, 16], ids="bs{}".format)
    def test_a_fork_and_its_source_write_apart(self, block_size: int) -> None:
        """Whoever writes first into the shared, partly filled block: the other one still reads what it wrote itself.

        Fails if a block that two rows read is written in place, and not copied first. Source: copy on write in
        PagedAttention (Kwon et al., SOSP 2023).
        """
        self.needs_blocks(2)
        for writers in ((0, 1), (1, 0)):
            cache, length = self.build(block_size, num_blocks=9), 2 * block_size - 2
            cache.match_prefix(0, range(length))
            assert cache.allocate(np.array([0]), np.array([length]))
            for position in range(length):
                self.write(cache, 0, position, position + 1.0)
            if not cache.fork(0, 1, length):
                pytest.skip(f"{self.backend.__name__} shares no blocks")
            for row in writers:
                assert cache.allocate(np.array([row]), np.array([length + 1]))
                self.write(cache, row, length, 100.0 + row)
            for row in writers:
                found = [self.read(cache, row, position) for position in range(length + 1)]
                expected = [*np.arange(1.0, length + 1), 100.0 + row]
                assert found == expected, f"row {row} of {writers} reads what the other one wrote"
            cache.check_integrity()

    def test_growing_no_request_is_fine(self) -> None:
        """An empty step asks for nothing and gets it.

        Fails for array operations that need at least one row. Source: the contract.
        """
        cache = self.build(16)
        assert cache.allocate(np.array([], dtype=np.int64), np.array([], dtype=np.int64))

    def test_storage_is_described_truly(self) -> None:
        """Layers, block table and bytes are what the contract says; memory starts finite, so a mask can hide it.

        Fails if memory is planned by other numbers than are allocated, or starts as NaN. Sources: the contract;
        sglang#35351.
        """
        cache = self.build(16, num_blocks=9)
        assert [layer.index for layer in cache.layers] == [0, 1]
        assert all(layer.spec == LAYER and layer.block_size == cache.block_size == 16 for layer in cache.layers)
        assert all(layer.layout == self.backend.layout for layer in cache.layers)
        assert cache.block_table.dtype == np.int32
        assert cache.block_table.shape[0] == 4
        assert (cache.block_table == NULL_BLOCK).all()
        tensors = [tensor for layer in cache.layers for tensor in (layer.key, layer.value)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        length = min(64, self.max_blocks * 16)
        spec = KVCacheSpec((LAYER, LAYER), 9, 4, length, torch.float32, torch.device(self.device))
        options = build_options(self.backend.Options, {**self.options, **_block_size(self.backend, 16)}, "options")
        promised = 9 * self.backend.block_bytes(spec, options)
        assert sum(s.nbytes() for s in storages.values()) == pytest.approx(promised, rel=0.02)
        for layer in cache.layers:
            assert bool(torch.isfinite(layer.key.float()).all() and torch.isfinite(layer.value.float()).all())
            if layer.layout == PAGED_NHD:
                assert layer.key.shape == layer.value.shape == (9, 16, LAYER.num_kv_heads, LAYER.head_size)


def _block_size(backend: type[KVCache], size: int) -> dict[str, int]:
    return {"block_size": size} if any(f.name == "block_size" for f in dataclasses.fields(backend.Options)) else {}
