"""Lay a case's numbers out in a paged cache by hand: block tables, slots, pool, batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from nanofw.batch import NULL_BLOCK, Batch
from nanofw.kv_cache import LayerKV
from nanofw.testing.cases import DTYPES, Case, Dense


@dataclass(frozen=True, slots=True)
class Layout:
    """How a case lies in memory. None of this may change the output of a real request.

    Attributes:
        order: seed of the permutation of blocks.
        fill: what unused slots and the null block hold. padding_fill: what q, k, v of padding requests hold.
        gap: elements between two blocks (layers that share one allocation leave such gaps: vllm-xpu-kernels#445).
        spare_tails: fill the tails of block tables with some other block than the null block.
        columns: columns of the block table that nobody needs.
        slack: how much the declared bounds exceed the real lengths.
        inputs: q, k and v as three tensors, as slices of one packed tensor, or with heads before tokens in memory.
        first_block: blocks below it are used by nobody.
    """

    order: int = 0
    fill: float = 0.0
    padding_fill: float = 0.0
    gap: int = 0
    spare_tails: bool = False
    columns: int = 0
    slack: int = 0
    inputs: Literal["plain", "packed", "heads-first"] = "plain"
    first_block: int = 1


PLAIN = Layout()


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A step, ready to be attended: this step's q, k, v (padding included), the cache without them, and the batch.

    Attributes:
        tables: `[B]` lists of block ids, only those a request owns.
        slots: `[t]` int64, where this step's live tokens go.
    """

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv: LayerKV
    batch: Batch
    tables: list[list[int]]
    slots: torch.Tensor

    @property
    def live_tokens(self) -> int:
        """Tokens of real requests; padding follows them."""
        return self.batch.num_tokens - self.batch.num_padding

    def split(self, out: torch.Tensor) -> list[torch.Tensor]:
        """The output of each real request."""
        return list(out[: self.live_tokens].split_with_sizes(list(self.case.query_lens)))


def lay_out(
    case: Case, dense: Dense, layout: Layout = PLAIN, *, kv: LayerKV | None = None, within: Problem | None = None
) -> Problem:
    """Build the step.

    Args:
        case: the description. dense: its numbers, or numbers derived from them.
        layout: how they lie in memory.
        kv: a cache to put the context in; None makes one.
        within: go on in the cache and blocks of this earlier step of the same requests; what the cache holds is not
            touched, so the context is what earlier steps wrote.
    """
    device = dense.q[0].device
    tables, num_blocks = _tables(case, layout)
    if within is not None:
        kv, tables = (
            within.kv,
            [t[: -(-s // case.block_size)] for t, s in zip(within.tables, case.contexts, strict=True)],
        )
    elif kv is None:
        kv = make_kv(case, num_blocks, device, layout.fill, layout.gap)
    slots = []
    for blocks, query_len, seq_len, k, v in zip(tables, case.query_lens, case.contexts, dense.k, dense.v, strict=True):
        table, position = np.asarray(blocks, dtype=np.int64), np.arange(seq_len)
        where = torch.from_numpy(table[position // case.block_size] * case.block_size + position % case.block_size)
        old = seq_len - query_len
        if within is None:
            store(kv, where[:old].to(device), k[:old], v[:old])
        slots.append(where[old:])
    live = torch.cat(slots)
    batch = _batch(case, layout, tables, live, device)
    q, k, v = _inputs(case, dense, layout)
    return Problem(case, q, k, v, kv, batch, tables, live.to(device))


def make_kv(case: Case, num_blocks: int, device: torch.device, fill: float = 0.0, gap: int = 0) -> LayerKV:
    """An empty cache; each block is followed by `gap` elements that belong to nobody."""
    shape = (case.block_size, case.kv_heads, case.head_size)
    size = case.block_size * case.kv_heads * case.head_size
    pools = [torch.full((num_blocks, size + gap), fill, dtype=DTYPES[case.dtype], device=device) for _ in range(2)]
    key, value = (pool[:, :size].view(num_blocks, *shape) for pool in pools)
    return LayerKV(0, case.layer, key, value, case.block_size)


def pools(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value storage `[N, *]`, gaps included."""
    stride = kv.key.stride(0)
    return tuple(t.as_strided((t.shape[0], stride), (stride, 1)) for t in (kv.key, kv.value))  # type: ignore[return-value]


def store(kv: LayerKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put k and v `[t, Hkv, D]` into slots `[t]`."""
    kv.key[slots // kv.block_size, slots % kv.block_size] = k
    kv.value[slots // kv.block_size, slots % kv.block_size] = v


def fetch(kv: LayerKV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[t, Hkv, D]` of slots `[t]`."""
    block, offset = slots // kv.block_size, slots % kv.block_size
    return kv.key[block, offset], kv.value[block, offset]


def _tables(case: Case, layout: Layout) -> tuple[list[list[int]], int]:
    """Give each request permuted blocks. The lowest block stays spare; the pool's last is the first request's first."""
    counts = [-(-length // case.block_size) for length in case.contexts]
    ids = layout.first_block + 1 + np.random.default_rng(layout.order).permutation(sum(counts))
    top = int(ids.argmax())
    ids[0], ids[top] = ids[top], ids[0]
    return [part.tolist() for part in np.split(ids, np.cumsum(counts)[:-1])], int(ids[0]) + 1


def _batch(case: Case, layout: Layout, tables: list[list[int]], live: torch.Tensor, device: torch.device) -> Batch:
    padding, spare = case.padding, layout.first_block if layout.spare_tails else NULL_BLOCK
    query_lens = np.array([*case.query_lens, *(1,) * padding], dtype=np.int64)
    seq_lens = np.array([*case.contexts, *(0,) * padding], dtype=np.int64)
    ends = query_lens.cumsum()
    positions = np.concatenate([np.arange(s - n, s) for n, s in zip(query_lens, np.maximum(seq_lens, 1), strict=True)])
    columns = -(-(int(seq_lens.max()) + layout.slack) // case.block_size) + layout.columns
    table = np.full((len(seq_lens), columns), spare, dtype=np.int32)
    table[len(tables) :] = NULL_BLOCK
    for row, blocks in zip(table, tables, strict=False):
        row[: len(blocks)] = blocks
    return Batch(
        token_ids=torch.arange(len(positions), device=device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.cat((live, torch.full((padding,), -1))).to(device),
        cu_seqlens_q=torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(device),
        block_table=torch.from_numpy(table).to(device),
        logits_indices=torch.from_numpy(ends - 1).to(device),
        max_query_len=int(query_lens.max()) + layout.slack,
        max_seq_len=int(seq_lens.max()) + layout.slack,
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
        num_padding=padding,
    )


def _inputs(case: Case, dense: Dense, layout: Layout) -> list[torch.Tensor]:
    new_k = [k[len(k) - n :] for k, n in zip(dense.k, case.query_lens, strict=True)]
    new_v = [v[len(v) - n :] for v, n in zip(dense.v, case.query_lens, strict=True)]
    packed = []
    for parts in (dense.q, new_k, new_v):
        padding = parts[0].new_full((case.padding, *parts[0].shape[1:]), layout.padding_fill)
        packed.append(torch.cat((*parts, padding)))
    if layout.inputs == "packed":
        heads = [tensor.shape[1] for tensor in packed]
        return list(torch.cat(packed, dim=1).split_with_sizes(heads, dim=1))
    if layout.inputs == "heads-first":
        return [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in packed]
    return packed
