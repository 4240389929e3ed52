"""My own attention.

Begin at the loop in `attend`: it takes one request after the other, so a batch of 16 makes sixteen times the calls of
one. `nanofw check my-attention` says so, and `nanofw bench --attention vectorized-gather,my-attention` what it costs.
"""

from __future__ import annotations

from typing import Any

import torch

import nanofw
from nanofw import Attention, Batch, Capabilities, CountLaw, LayerKV

nanofw_api = (1, 0)


class MyAttention(Attention):
    """One request after another: fetch its keys and values, then attend in float32."""

    # What it can do. Anything else is refused when an engine is built, and not tested.
    capabilities = Capabilities(windows=True, soft_cap=True, reads_padding=False)
    # What a step costs, which is held to it. The two that grow with B, the requests, are what to remove.
    laws = (
        CountLaw("aten_calls", grows_with=("B",)),
        CountLaw("python_calls", grows_with=("B",)),
        CountLaw("launches"),
        CountLaw("host_reads"),
    )

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """Queries `[T, Hq, D]` of all requests, packed, to the same shape. `nanofw/batch.py` explains the letters."""
        out, start = torch.zeros_like(q), 0
        for table, n, s in zip(batch.block_table, batch.query_lens_host, batch.seq_lens_host, strict=True):
            if s:  # requests that only fill a bucket have no context, and their rows stay zero
                blocks = table[: -(-s // kv.block_size)].long()
                k, v = (cache[blocks].flatten(0, 1)[:s].float() for cache in (kv.key, kv.value))
                out[start : start + n] = attend_one(q[start : start + n].float(), k, v, kv.spec)
            start += n
        return out


def attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: nanofw.LayerSpec) -> torch.Tensor:
    """Queries `[n, Hq, D]` of the last n positions over keys and values `[s, Hkv, D]` of all positions."""
    (n, heads, _), (s, kv_heads, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))  # heads that share a key stand side by side
    scores = torch.einsum("nhd,shd->hns", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    query, key = torch.arange(s - n, s, device=q.device)[:, None], torch.arange(s, device=q.device)
    hidden = key > query
    if spec.window is not None:
        hidden |= key <= query - spec.window
    return torch.einsum("hns,shd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(dim=-1), v)


@nanofw.hookimpl
def nanofw_register_attention(register: Any) -> None:
    """Tell nanofw the name."""
    register("my-attention", MyAttention)
