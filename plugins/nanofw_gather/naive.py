"""The "before" picture: attention that gathers K and V token by token, in Python.

It is right, and short, and what many first engines do. Each decode step makes B * context tiny copies a layer, so the
time goes to Python and to launches, not to memory or arithmetic, and a larger batch only makes more of them.
"""

from __future__ import annotations

import torch

from nanofw.attention import Attention, Capabilities
from nanofw.batch import Batch
from nanofw.kv_cache import LayerKV
from nanofw.laws import CountLaw, ScalingLaw


class NaiveGather(Attention):
    """For each sequence, for each position: fetch one key and one value. Then plain attention."""

    capabilities = Capabilities(windows=True, soft_cap=True, batch_invariant=True, reads_padding=False)
    laws = (
        CountLaw("aten_calls", grows_with=("B", "B*ctx")),  # why batching does not help
        CountLaw("bytes_written", grows_with=("B", "B*ctx")),
        CountLaw("python_calls", grows_with=("B",)),
        CountLaw("host_reads"),
        CountLaw("launches"),
        ScalingLaw(at_most=3.0, context=192),
    )

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """One sequence after the other; see the contract."""
        out, start = torch.zeros_like(q), 0
        tables = batch.block_table.tolist()
        for table, query_len, seq_len in zip(tables, batch.query_lens_host, batch.seq_lens_host, strict=True):
            keys, values = [], []
            for position in range(seq_len):
                block, offset = table[position // kv.block_size], position % kv.block_size
                keys.append(kv.key[block, offset])
                values.append(kv.value[block, offset])
            if keys:
                queries = q[start : start + query_len]
                out[start : start + query_len] = attend_one(queries, torch.stack(keys), torch.stack(values), kv)
            start += query_len
        return out


def attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV) -> torch.Tensor:
    """Causal attention of one sequence, softmax in float32.

    Args:
        q: `[n, Hq, D]`, the last n positions. k, v: `[s, Hkv, D]`, all positions.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,shd->hns", q, k).float() * kv.spec.scale
    if kv.spec.soft_cap is not None:
        scores = kv.spec.soft_cap * torch.tanh(scores / kv.spec.soft_cap)
    query = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
    key = torch.arange(k.shape[0], device=q.device)
    hidden = key > query
    if kv.spec.window is not None:
        hidden |= key <= query - kv.spec.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).to(v.dtype)
    return torch.einsum("hns,shd->nhd", weights, v)
