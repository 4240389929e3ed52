"""The paged cache: the shipped suite, and what it says to a user."""

import pytest
import torch
from hypothesis import Phase

from nanofw.errors import ConfigError
from nanofw.kv_cache import KVCacheSpec, LayerSpec
from nanofw.options import build_options
from nanofw.testing.kv_cache_suite import KVCacheSuite
from nanofw_basics.paged_cache import PagedKVCache


class TestPagedKVCache(KVCacheSuite):
    backend = PagedKVCache


@pytest.mark.parametrize("size", [0, -1])
def test_block_size_must_be_positive(size):
    with pytest.raises(ConfigError, match=f"block_size must be at least 1, got {size}"):
        build_options(PagedKVCache.Options, {"block_size": size}, 'kv_cache "paged"')


def test_block_table_is_no_wider_than_the_pool():
    cache = TestPagedKVCache.build(16, num_blocks=3, max_len=4096)
    assert cache.block_table.shape == (4, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_pool_takes_no_memory_before_it_is_used(dtype):
    process = pytest.importorskip("psutil").Process()
    before = process.memory_info().rss
    layer = LayerSpec(num_heads=4, num_kv_heads=4, head_size=64, scale=0.125)
    spec = KVCacheSpec((layer,), num_blocks=2**14, rows=1, max_len=64, dtype=dtype, device=torch.device("cpu"))
    cache = PagedKVCache(spec, PagedKVCache.Options(block_size=32))
    key = cache.layers[0].key
    assert key.shape == (2**14, 32, 4, 64)
    assert key.dtype == dtype
    assert not key[[0, 1, 2**14 - 1]].any()
    assert process.memory_info().rss - before < 2 * key.nbytes / 10


class LosesABlock(PagedKVCache):
    """Gives back one block too few, and hides it: its own books look right."""

    def free(self, row):
        if self._held[row] > 2:
            self._held[row] -= 1
            self.block_table[row, self._held[row]] = 0
        super().free(row)

    def check_integrity(self):
        pass


class GrantsInPart(PagedKVCache):
    """Takes what there is, then reports failure."""

    def allocate(self, rows, lengths):
        return super().allocate(rows, lengths) or (super().allocate(rows[:1], lengths[:1]) and False)


class HandsOutTwice(PagedKVCache):
    """A block that was just given back is put on the stack a second time."""

    def free(self, row):
        first = self.block_table[row, 0]
        super().free(row)
        if first and self._num_free < len(self._free):
            self._free[self._num_free] = first
            self._num_free += 1

    def check_integrity(self):
        pass


class HandsOutNull(PagedKVCache):
    """Counts the null block among the free ones."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self._free[0] = 0


class ForgetsTails(PagedKVCache):
    """Leaves the names of blocks in the table of a request that has gone."""

    def free(self, row):
        before = self.block_table[row].copy()
        super().free(row)
        self.block_table[row] = before

    def check_integrity(self):
        pass


class RoundsDown(PagedKVCache):
    """Has no block for the last, partly filled one."""

    def allocate(self, rows, lengths):
        return super().allocate(rows, lengths - lengths % self.block_size)


@pytest.mark.parametrize("mutant", [LosesABlock, GrantsInPart, HandsOutTwice, HandsOutNull, ForgetsTails, RoundsDown])
def test_the_suite_finds(mutant):
    suite = type("Suite", (KVCacheSuite,), {"backend": mutant, "phases": (Phase.generate,), "max_examples": 2000})()
    with pytest.raises(Exception):  # noqa: B017, PT011 (how a broken cache ends is its own affair)
        suite.test_conservation(3)


class ChecksNothing(PagedKVCache):
    def check_integrity(self):
        pass


@pytest.mark.parametrize("damage", ["stolen", "leaked", "tail"])
def test_the_suite_finds_a_check_that_checks_nothing(damage):
    suite = type("Suite", (KVCacheSuite,), {"backend": ChecksNothing})()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        suite.test_check_integrity_finds(damage)
