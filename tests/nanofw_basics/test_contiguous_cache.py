"""The contiguous cache: the shipped suite, and what a slab a request means."""

import numpy as np
import pytest

from nanofw import SamplingParams
from nanofw.errors import ConfigError, RequestError
from nanofw.testing.kv_cache_suite import KVCacheSuite
from nanofw_basics.contiguous_cache import ContiguousKVCache


class TestContiguousKVCache(KVCacheSuite):
    backend = ContiguousKVCache
    max_blocks = 1


def test_a_request_holds_one_slab_whatever_its_length():
    cache = TestContiguousKVCache.build(64, num_blocks=4, rows=4)
    assert cache.capacity == 64
    assert cache.allocate(np.array([0, 1]), np.array([1, 64]))
    assert cache.free_blocks == 1
    assert not cache.allocate(np.array([2, 3]), np.array([1, 1]))
    assert cache.allocate(np.array([2]), np.array([1]))


def test_tokens_lie_side_by_side():
    cache = TestContiguousKVCache.build(64, num_blocks=4, rows=1)
    cache.allocate(np.array([0]), np.array([64]))
    assert cache.layers[0].key[cache.block_table[0, 0]].is_contiguous()


def test_served(llm):
    """As many at once as there are slabs; the tokens are those of the paged cache."""
    prompts = ["one", "two, longer", "three, and longer still", "four"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [o.outputs for o in llm().generate(prompts, params)]
    engine = llm(kv_cache="contiguous", kv_blocks=2, max_model_len=64)
    assert [o.outputs for o in engine.generate(prompts, params)] == expected
    assert engine.engine.notes[0].startswith("KV cache: 2 blocks of 64 slots, 128 tokens")
    with pytest.raises(RequestError, match="at a length limit of 64"):
        engine.generate([[1] * 64])


def test_it_has_no_options(llm):
    with pytest.raises(ConfigError, match="kv_cache 'contiguous' has no option 'block_size'; it takes nothing"):
        llm(kv_cache="contiguous", options={"kv_cache": {"block_size": 16}})
