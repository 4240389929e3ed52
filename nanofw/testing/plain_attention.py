"""The plainest attention over a paged cache that takes every step: what suites of models and runners attend with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanofw.attention import Attention, Capabilities
from nanofw.batch import Batch
from nanofw.kv_cache import LayerKV


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Which request each token is of and where in it: `owner`, `position` `[T]` int64; `table` `[B, M]` int64."""

    owner: torch.Tensor
    position: torch.Tensor
    table: torch.Tensor


class PlainAttention(Attention):
    """Each token gathers its own keys and values: slow, and nothing in it depends on lengths that only the host knows.

    All it knows of a step is in its plan, made of tensors alone, so it can be captured in a graph, and a step that
    comes without a plan, or with that of another one, goes wrong. What a token does not see is left out before it is
    multiplied: NaN in unused slots reaches nobody.
    """

    capabilities = Capabilities(windows=True, soft_cap=True, graphs=True, reads_padding=False)

    def plan(self, batch: Batch) -> Plan:
        """Made of device tensors, without reading them."""
        token = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.token_ids.device)
        owner = torch.searchsorted(batch.cu_seqlens_q, token, right=True) - 1
        position = batch.seq_lens[owner] - batch.cu_seqlens_q[owner + 1] + token
        return Plan(owner, position.long(), batch.block_table.long())

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """See the contract."""
        plan, spec = batch.plan, kv.spec
        group = spec.num_heads // spec.num_kv_heads
        blocks = plan.table[plan.owner]
        k, v = (pool[blocks].flatten(1, 2).repeat_interleave(group, dim=2) for pool in (kv.key, kv.value))
        position, key = plan.position[:, None], torch.arange(k.shape[1], device=q.device)
        seen = key <= position
        if spec.window is not None:
            seen &= key > position - spec.window
        scores = torch.einsum("thd,tshd->ths", q, k) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=-1)
        weights = torch.where(position[:, None] >= 0, weights, 0.0)  # padding sees nothing
        return torch.einsum("ths,tshd->thd", weights, torch.where(seen[:, :, None, None], v, 0.0))
