"""The vectorized gather with torch's own fused attention in place of its softmax.

Scores never reach memory: a fused kernel keeps a tile of them on the chip (FlashAttention, Dao et al., 2022), chosen by
`scaled_dot_product_attention` for the device at hand. What is left is the copy of K and V that gathering makes.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from nanofw.attention import Capabilities
from nanofw.kv_cache import LayerKV
from nanofw_gather.vectorized import Group, VectorizedGather


class FlashGather(VectorizedGather):
    """One gather, one fused attention. Any ratio of heads, head size and window; torch's kernels cap no scores."""

    capabilities = Capabilities(windows=True, reads_padding=False)

    def attend_group(self, q: torch.Tensor, kv: LayerKV, group: Group) -> torch.Tensor:
        """`q` `[b, Q, Hq, D]` to the same shape."""
        requests, queries, heads, size = q.shape
        kv_heads = kv.key.shape[2]
        unused = group.beyond[:, :, None, None]
        k, v = (
            # A fused kernel adds its mask to the scores, so a NaN in an unused key would stay one.
            pool[group.table].reshape(requests, -1, kv_heads, size).masked_fill_(unused, 0).transpose(1, 2)
            for pool in (kv.key, kv.value)
        )
        # The heads that share K and V stand side by side as queries: nothing is repeated for them.
        ratio = heads // kv_heads
        grouped = q.view(requests, queries, kv_heads, ratio, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        visible = group.visible(kv.spec.window)[:, None]
        if queries > 1:
            visible = visible.repeat(1, 1, ratio, 1)
        out = scaled_dot_product_attention(grouped, k, v, visible, scale=kv.spec.scale)
        return out.reshape(requests, heads, queries, size).transpose(1, 2)
