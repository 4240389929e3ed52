"""What attention *is*: float64, one sequence, one head and one query at a time.

Nothing fast is imported from here and nothing here is fast. Read it next to a kernel to see what the kernel must give.
"""

from __future__ import annotations

import torch

from nanofw.kv_cache import LayerSpec


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """Causal attention of one sequence's last n tokens over all of its s tokens.

    Args:
        q: `[n, Hq, D]`, queries of the last n positions.
        k, v: `[s, Hkv, D]`, keys and values of all positions.
        spec: scale, window and soft cap.

    Returns:
        `[n, Hq, D]` float64 on the CPU.
    """
    q, k, v = (tensor.detach().to("cpu", torch.float64) for tensor in (q, k, v))
    queries, heads, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros_like(q)
    for head in range(heads):
        keys, values = k[:, head // group], v[:, head // group]
        for query in range(queries):
            position = k.shape[0] - queries + query
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            seen = slice(first, position + 1)
            weights = scores(q[query, head], keys[seen], spec).softmax(dim=0)
            out[query, head] = weights @ values[seen]
    return out


def scores(q: torch.Tensor, keys: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """Scores of one query `[D]` against the keys it sees `[s, D]`: scaled, then capped."""
    scaled = keys @ q * spec.scale
    if spec.soft_cap is None:
        return scaled
    return spec.soft_cap * torch.tanh(scaled / spec.soft_cap)
