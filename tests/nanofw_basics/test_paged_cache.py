"""The paged cache: the shipped suite, and what it says to a user."""

import pytest
import torch

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
