"""Gather by block table: one indexing operation fetches all K of a batch, one all V, then one masked attention.

The number of operations no longer depends on batch or context, so Python stops being the limit. What is left is that K
and V are copied before they are used: three times the traffic of a kernel that reads the cache in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanofw.attention import Attention, Capabilities
from nanofw.batch import Batch
from nanofw.kv_cache import LayerKV
from nanofw.laws import FLAT, CountLaw

if TYPE_CHECKING:
    from nanofw.table import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Requests of a step that are attended together, their queries padded to one length Q.

    A step that mixes decode and prefill makes two groups: padding the decode queries to the longest chunk would
    multiply their work.

    Attributes:
        table: `[b, m]` int64, block tables cut to the longest context; S = m * BS key positions.
        tokens: `[b, Q]` int64, where each query stands in the packed dimension (for a padded one, any token).
        real: `[n]` int64, which of the b * Q queries exist.
        query_pos: `[b, Q, 1]` int64, position of each query.
        beyond: `[b, S]` bool, key positions past the request's end.
    """

    table: torch.Tensor
    tokens: torch.Tensor
    real: torch.Tensor
    query_pos: torch.Tensor
    beyond: torch.Tensor

    def visible(self, window: int | None) -> torch.Tensor:
        """`[b, Q, S]` bool: which keys each query sees, the last `window` up to its own."""
        key_pos = torch.arange(self.beyond.shape[1], device=self.beyond.device)
        seen = key_pos <= self.query_pos
        return seen if window is None else seen & (key_pos > self.query_pos - window)


class VectorizedGather(Attention):
    """One gather, one masked attention. Any ratio of heads, head size, window and soft cap."""

    capabilities = Capabilities(windows=True, soft_cap=True, reads_padding=False)
    laws = (*FLAT, CountLaw("bytes_written", grows_with=("B", "B*ctx")))

    def plan(self, batch: Batch) -> list[Group]:
        """Split the step into its decode and its prefill requests. Reads lengths on the host: nobody waits."""
        decode = batch.query_lens_host == 1
        decode &= batch.seq_lens_host > 0  # padding has no context, and its rows stay zero
        parts = [np.flatnonzero(decode), np.flatnonzero(batch.query_lens_host > 1)]
        return [self._group(batch, chosen) for chosen in parts if len(chosen)]

    def _group(self, batch: Batch, chosen: IntArray) -> Group:
        device, block_size = batch.block_table.device, self.spec.block_size
        query_lens, seq_lens = batch.query_lens_host[chosen], batch.seq_lens_host[chosen]
        first = (np.cumsum(batch.query_lens_host) - batch.query_lens_host)[chosen]
        nth = np.arange(query_lens.max())
        exists = nth < query_lens[:, None]
        tokens = np.where(exists, first[:, None] + nth, first[:, None])
        query_pos = (seq_lens - query_lens)[:, None] + nth
        columns = max(-(-int(seq_lens.max()) // block_size), 1)
        beyond = np.arange(columns * block_size) >= seq_lens[:, None]

        def move(array: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        table = batch.block_table[:, :columns]
        if len(chosen) < len(batch.query_lens_host):
            table = table[move(chosen)]
        real = np.flatnonzero(exists)
        return Group(table.long(), move(tokens), move(real), move(query_pos[:, :, None]), move(beyond))

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """Each group in one go; see the contract."""
        out = torch.zeros_like(q)
        groups: list[Group] = batch.plan
        for group in groups:
            attended = self.attend_group(q[group.tokens], kv, group)
            out[group.tokens.flatten()[group.real]] = attended.flatten(0, 1)[group.real]
        return out

    def attend_group(self, q: torch.Tensor, kv: LayerKV, group: Group) -> torch.Tensor:
        """`q` `[b, Q, Hq, D]` to the same shape."""
        requests, queries, heads, size = q.shape
        kv_heads = kv.key.shape[2]
        k = kv.key[group.table].reshape(requests, -1, kv_heads, size)
        v = kv.value[group.table].reshape(requests, -1, kv_heads, size)
        # Slots past a request's end may hold anything; a weight of 0 must not meet a NaN there.
        v = v.masked_fill(group.beyond[:, :, None, None], 0)
        hidden = ~group.visible(kv.spec.window)
        grouped = q.view(requests, queries, kv_heads, heads // kv_heads, size)
        scores = torch.einsum("bqhgd,bshd->bhgqs", grouped, k).float() * kv.spec.scale
        if kv.spec.soft_cap is not None:
            scores = kv.spec.soft_cap * torch.tanh(scores / kv.spec.soft_cap)
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1).to(v.dtype)
        return torch.einsum("bhgqs,bshd->bqhgd", weights, v).reshape(requests, queries, heads, size)
