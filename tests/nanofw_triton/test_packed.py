"""Raw projections in, attention out: the one-launch decode equals norm, rotation, write and attention in torch."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from nanofw.attention import AttentionSpec, Prologue
from nanofw.batch import Batch
from nanofw.kv_cache import LayerKV, LayerSpec
from nanofw_gather.vectorized import VectorizedGather
from nanofw_triton.attention import TritonPagedAttention

CASES = {
    "ragged": (LayerSpec(4, 2, 64, 64**-0.5), 16, (1, 2, 16, 17, 97, 0), True),
    "odd blocks, no norm": (LayerSpec(8, 2, 32, 32**-0.5), 3, (5, 130, 64, 65), False),
    "window and cap": (LayerSpec(6, 1, 96, 96**-0.5, window=7, soft_cap=30.0), 16, (40, 200), True),
    "a group of 16": (LayerSpec(16, 1, 64, 64**-0.5), 16, (129, 1, 0), True),
    "window at a tile's edge": (LayerSpec(4, 4, 80, 80**-0.5, window=64), 1, (77, 3), True),
}


def problem(layer, block_size, lengths, norm, dtype, device):
    """A decode step with context of random numbers: qkv, prologue, cache, batch."""
    torch.manual_seed(0)
    count, size = len(lengths), layer.head_size
    columns = -(-max(lengths) // block_size)
    table = (torch.randperm(count * columns) + 1).view(count, columns).int()
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // block_size) :] = 0
    last = [max(s - 1, 0) for s in lengths]
    slots = [int(table[i, p // block_size]) * block_size + p % block_size for i, p in enumerate(last)]
    slots = [slot if s else -1 for slot, s in zip(slots, lengths, strict=True)]
    angle = torch.rand(256, size // 2) * 6
    weights = [(torch.rand(size) + 0.5).to(device) if norm else None for _ in range(2)]
    cos, sin = (torch.cat([t, t], dim=1).to(device) for t in (angle.cos(), angle.sin()))
    pool = torch.randn(2, count * columns + 1, block_size, layer.num_kv_heads, size).to(dtype).to(device)
    batch = Batch(
        token_ids=torch.zeros(count, dtype=torch.int64, device=device),
        positions=torch.tensor(last, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        logits_indices=torch.arange(count, device=device),
        max_query_len=1,
        max_seq_len=max(lengths),
        query_lens_host=np.ones(count, dtype=np.int64),
        seq_lens_host=np.array(lengths),
        num_padding=lengths.count(0),
    )
    qkv = torch.randn(count, (layer.num_heads + 2 * layer.num_kv_heads) * size).to(dtype).to(device)
    return qkv, Prologue(cos, sin, *weights, 1e-6), pool, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("case", CASES)
def test_packed_decode_equals_its_parts(case, splits, dtype):
    layer, block_size, lengths, norm = CASES[case]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    qkv, prologue, pool, batch = problem(layer, block_size, lengths, norm, dtype, device)
    spec = AttentionSpec((layer,), dtype, device, block_size)
    found = []
    for attention in (
        VectorizedGather(spec, VectorizedGather.Options()),
        TritonPagedAttention(spec, TritonPagedAttention.Options(splits=splits)),
    ):
        key, value = pool.clone()
        kv = LayerKV(0, layer, key, value, block_size)
        out = attention.forward_packed(qkv, prologue, kv, batch.with_plan(attention.plan(batch)))
        found.append((out.float(), key.float(), value.float()))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for what, expected, got in zip(("output", "keys", "values"), *found, strict=True):
        assert (got - expected).abs().max() <= tolerance, what
