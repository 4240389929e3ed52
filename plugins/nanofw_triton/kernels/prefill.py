"""Prefill attention (FlashAttention, Dao et al., 2022) over the paged cache, for chunks of any length.

A program serves one tile of a request's query tokens and one KV head; the G query heads that share it are packed into
the rows of the tile, so a key is loaded once for all of them. Which tile belongs to which request is a table that the
host makes from the lengths it knows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanofw_triton.kernels.decode import LOG2_E, cap_scores


@triton.jit
def prefill_kernel(
    q_ptr,  # [T, Hq, D]
    key_ptr,  # [N, BS, Hkv, D]
    value_ptr,
    out_ptr,  # [T, Hq, D]
    tiles_ptr,  # [tiles, 2] int32: request, first query token of the tile within the request
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    table_ptr,
    scale,
    q_stride_t,
    q_stride_h,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_h,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    QUERIES: tl.constexpr,  # query tokens a tile
    ROWS: tl.constexpr,  # QUERIES * GROUP, padded to a power of two
    TILE: tl.constexpr,  # keys a loop turn
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one tile of queries to all keys they may see."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    first_query = tl.load(tiles_ptr + 2 * tile + 1)
    begin = tl.load(cu_seqlens_q_ptr + request)
    query_len = tl.load(cu_seqlens_q_ptr + request + 1) - begin
    seq_len = tl.load(seq_lens_ptr + request)

    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP  # within the request
    head = kv_head * GROUP + row % GROUP
    size = tl.arange(0, SIZE_PAD)
    real_row = (row < QUERIES * GROUP) & (query < query_len)
    real = real_row[:, None] & (size < SIZE)[None, :]
    token = (begin + query).to(tl.int64)
    q = tl.load(q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + size[None, :], mask=real, other=0.0)
    position = seq_len - query_len + query  # of each query in its context

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE_PAD], tl.float32)
    last = tl.minimum(first_query + QUERIES, query_len) + seq_len - query_len  # keys the tile's last query sees
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len + first_query - WINDOW + 1, 0)
    for base in range(first, last, TILE):
        key_pos = base + tl.arange(0, TILE)
        inside = key_pos < last
        block = tl.load(table_ptr + request * table_stride + key_pos // BLOCK_SIZE, mask=inside, other=0)
        at = block.to(tl.int64) * kv_stride_block + (key_pos % BLOCK_SIZE) * kv_stride_slot + kv_head * kv_stride_h
        loaded = inside[:, None] & (size < SIZE)[None, :]
        k = tl.load(key_ptr + at[:, None] + size[None, :], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFT_CAP > 0:
            scores = cap_scores(scores, SOFT_CAP)
        seen = key_pos[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key_pos[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen & inside[None, :], scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen no key yet keeps -inf; subtracting it from itself would be NaN.
        base_top = tl.where(new_top > float("-inf"), new_top, 0.0)
        weights = tl.exp2(scores - base_top[:, None])
        shrink = tl.exp2(top - base_top)
        v = tl.load(value_ptr + at[:, None] + size[None, :], mask=loaded, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, axis=1)
        top = new_top

    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = (token * HEADS + head) * SIZE
    tl.store(out_ptr + at[:, None] + size[None, :], out.to(out_ptr.dtype.element_ty), mask=real)
