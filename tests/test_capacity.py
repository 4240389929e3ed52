"""How large the KV cache is, what is said about it, and what happens when it is too small."""

import psutil
import pytest
import torch

from nanofw import Config, KVCacheSpec, LayerSpec, SamplingParams, capacity
from nanofw.errors import CapacityError, RequestError
from nanofw_basics.paged_cache import PagedKVCache

LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)
BLOCK = 2 * 2 * 8 * 16 * 4 * 3  # K and V, heads, size, slots, bytes, layers


def no_step():
    raise AssertionError("a step was run to measure memory that nobody asked about")


def choose(model_len=1000, device="cpu", peak_bytes=no_step, **settings):
    config = Config(**{"max_num_seqs": 4} | settings)
    length = config.max_model_len or model_len
    spec = KVCacheSpec((LAYER,) * 3, 0, config.max_num_seqs, length, torch.float32, torch.device(device))
    return capacity.choose(config, PagedKVCache, spec, PagedKVCache.Options(), model_len, peak_bytes)


@pytest.fixture
def free(monkeypatch):
    """Pretend that so much memory is free: of a CPU machine, or of a GPU with a total."""

    def pretend(free, total=None):
        if total is None:
            monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))

    return pretend


def test_blocks():
    """As many as asked for, and the null block beside them."""
    found = choose(kv_blocks=63)
    assert (found.num_blocks, found.max_model_len) == (64, 1000)
    assert found.notes == ("KV cache: 63 blocks of 16 slots, 1,008 tokens, 378.0 KiB (as set by kv_blocks)",)


def test_memory():
    """As many whole blocks as fit."""
    found = choose(kv_memory=f"{64 * BLOCK - 1}B")
    assert (found.num_blocks, found.max_model_len) == (64, 1000)
    assert "63 blocks of 16 slots" in found.notes[0]
    assert f"as set by kv_memory={64 * BLOCK - 1}B" in found.notes[0]


def test_a_quarter_of_a_cpu_machines_free_memory(free):
    free(4 * 100 * BLOCK)
    found = choose()
    assert found.num_blocks == 101
    assert found.notes[0].endswith("(25% of the memory that is free)")


def test_no_more_than_can_be_used(free):
    """Not gigabytes for four requests of 1,000 tokens."""
    free(2**40)
    found = choose()
    assert found.num_blocks == 4 * 63 + 1
    assert found.notes[0].endswith("(all that 4 requests of 1,000 tokens can use)")


def test_a_gpu_after_its_largest_step(free):
    """90 % of all of it, less what is in use, less what a step takes."""
    total = 1000 * BLOCK
    free(total - 300 * BLOCK, total)
    found = choose(device="cuda", peak_bytes=lambda: 500 * BLOCK, max_num_seqs=64)
    assert found.num_blocks == 100 + 1
    assert "90% of the GPU less 1.8 MiB in use and 2.9 MiB for a step" in found.notes[0]


def test_a_gpu_without_room(free):
    free(500 * BLOCK, 1000 * BLOCK)
    with pytest.raises(
        CapacityError, match=r"of 5\.9 MiB, 2\.9 MiB are in use .* lower max_batch_tokens, or set kv_me"
    ):
        choose(device="cuda", peak_bytes=lambda: 500 * BLOCK)


@pytest.mark.parametrize("setting", [{"kv_memory": "100B"}, {}])
def test_less_than_a_block(free, setting):
    free(1000)
    with pytest.raises(
        CapacityError, match="the KV cache has no room for a single block: raise kv_memory or kv_blocks"
    ):
        choose(**setting)


def test_memory_for_less_than_one_request_limits_requests():
    found = choose(kv_memory=f"{10 * BLOCK}B")
    assert (found.num_blocks, found.max_model_len) == (11, 160)
    assert found.notes[1].startswith(
        "The model takes 1,000 tokens and the KV cache holds 160: requests are limited to 160"
    )


def test_memory_for_less_than_one_request_of_the_length_asked_for():
    message = (
        r"holds 160 tokens, too few for one request of max_model_len=500: raise kv_memory, or set max_model_len to 160"
    )
    with pytest.raises(CapacityError, match=message):
        choose(kv_memory=f"{10 * BLOCK}B", max_model_len=500)
    assert choose(kv_memory=f"{10 * BLOCK}B", max_model_len=160).max_model_len == 160


def test_the_last_token_needs_no_slot():
    assert choose(kv_memory=f"{10 * BLOCK}B", max_model_len=161).notes[1:] == ()


def test_blocks_set_by_hand_may_be_few():
    found = choose(kv_blocks=10)
    assert (found.num_blocks, found.max_model_len) == (11, 1000)
    assert found.notes[1] == (
        "One request may take 1,000 tokens and the KV cache holds 160: a longer prompt is refused, and a request that "
        'outgrows the cache ends as "kv_capacity"'
    )


def test_an_engine_is_of_the_size_that_was_chosen(llm):
    """From setting to refusal, with a real model: 10 blocks of 16 slots."""
    block = 10 * 16
    engine = llm(kv_blocks=10)
    assert engine.engine.kv_cache.capacity == block
    assert engine.engine.notes[0].startswith("KV cache: 10 blocks of 16 slots, 160 tokens")
    with pytest.raises(RequestError, match="161 tokens and the whole KV cache holds 160; it can never run"):
        engine.generate([[1] * 161])
    (output,) = engine.generate([[1] * 160], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert output.outputs[0].finish_reason == "kv_capacity"


def test_an_engine_within_its_memory(llm):
    """The cache's tensors take no more than kv_memory, but for the null block."""
    engine = llm(kv_blocks=None, kv_memory="1MiB").engine
    layers = engine.kv_cache.layers
    per_block = sum(t[0].nbytes for layer in layers for t in (layer.key, layer.value))
    assert 2**20 - per_block < sum(t[1:].nbytes for layer in layers for t in (layer.key, layer.value)) <= 2**20
    assert engine.max_model_len <= engine.kv_cache.capacity
