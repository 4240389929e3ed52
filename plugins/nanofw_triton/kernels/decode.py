"""Decode attention: one query token a request, K and V read in place through the block table.

A program serves one request, one KV head and one split of the context. The G query heads that share the KV head are
packed into one tile, so each key is read once for all of them. Long contexts at small batches are split so that the
whole GPU reads (Flash-Decoding, Dao et al., 2023); a second kernel merges the splits in a fixed order, so results are
the same bits every time. The grid follows from declared bounds alone and lengths are read on the device: a CUDA graph
can hold it.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cap_scores(scores, SOFT_CAP: tl.constexpr):
    """`cap * tanh(scores / cap)`, tanh made of exp, which the interpreter has too.

    Near 0, where that cancels, it is a series: up to 1/4 the first term left out is below 1e-8 of the result.
    """
    x = scores / SOFT_CAP
    square = x * x
    near = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835)))))
    return SOFT_CAP * tl.where(square < 0.0625, near, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def decode_kernel(
    q_ptr,  # [T, Hq, D]
    key_ptr,  # [N, BS, Hkv, D]
    value_ptr,
    out_ptr,  # [T, Hq, D], or [splits, T, Hq, D] float32 when split
    lse_ptr,  # [splits, T, Hq] float32, base 2; unused when not split
    requests_ptr,  # [R] int32, which requests decode, in which order; unused when all do, in theirs
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
    num_tokens,
    ALL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # Hq
    GROUP: tl.constexpr,  # Hq / Hkv
    GROUP_PAD: tl.constexpr,
    SIZE: tl.constexpr,  # D
    SIZE_PAD: tl.constexpr,
    TILE: tl.constexpr,  # keys a loop turn
    STAGES: tl.constexpr,  # loop turns in flight
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # 0: none
    PRECISION: tl.constexpr,
):
    """Attend over one split of one request's context for one KV head."""
    kv_head, split, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = index if ALL else tl.load(requests_ptr + index)
    token = tl.load(cu_seqlens_q_ptr + request).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)

    first = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0
    per_split = tl.cdiv(tl.cdiv(seq_len - first, TILE), SPLITS) * TILE
    start = first + split * per_split
    end = tl.minimum(start + per_split, seq_len)

    heads = tl.arange(0, GROUP_PAD)
    size = tl.arange(0, SIZE_PAD)
    real = (heads < GROUP)[:, None] & (size < SIZE)[None, :]
    query_heads = kv_head * GROUP + heads
    q = tl.load(q_ptr + token * q_stride_t + query_heads[:, None] * q_stride_h + size[None, :], mask=real, other=0.0)

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, SIZE_PAD], tl.float32)
    for base in tl.range(start, end, TILE, num_stages=STAGES):
        position = base + tl.arange(0, TILE)
        inside = position < end
        block = tl.load(table_ptr + request.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=inside, other=0)
        # int64: block id times stride passes 2**31 in a large pool
        at = block.to(tl.int64) * kv_stride_block + (position % BLOCK_SIZE) * kv_stride_slot + kv_head * kv_stride_h
        loaded = inside[:, None] & (size < SIZE)[None, :]
        k = tl.load(key_ptr + at[:, None] + size[None, :], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFT_CAP > 0:
            scores = cap_scores(scores, SOFT_CAP)
        scores = tl.where(inside[None, :], scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        v = tl.load(value_ptr + at[:, None] + size[None, :], mask=loaded, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, axis=1)
        top = new_top

    out = tl.where(total[:, None] > 0, acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    row = (split * num_tokens + token) * HEADS + query_heads  # int64 through token
    tl.store(out_ptr + row[:, None] * SIZE + size[None, :], out.to(out_ptr.dtype.element_ty), mask=real)
    if SPLITS > 1:
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + row, lse, mask=heads < GROUP)


@triton.jit
def merge_kernel(
    partial_ptr,  # [splits, T, Hq, D] float32
    lse_ptr,  # [splits, T, Hq] float32
    out_ptr,  # [T, Hq, D]
    requests_ptr,
    cu_seqlens_q_ptr,
    num_tokens,
    ALL: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """Weigh the splits of one request and head by their share of the softmax, in the order of the splits."""
    index, head = tl.program_id(0), tl.program_id(1)
    request = index if ALL else tl.load(requests_ptr + index)
    token = tl.load(cu_seqlens_q_ptr + request).to(tl.int64)
    split = tl.arange(0, SPLITS_PAD)
    size = tl.arange(0, SIZE_PAD)
    row = (split * num_tokens + token) * HEADS + head
    lse = tl.load(lse_ptr + row, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(lse, axis=0)
    weights = tl.where(lse > float("-inf"), tl.exp2(lse - tl.where(top > float("-inf"), top, 0.0)), 0.0)
    total = tl.sum(weights, axis=0)
    real = (split < SPLITS)[:, None] & (size < SIZE)[None, :]
    partial = tl.load(partial_ptr + row[:, None] * SIZE + size[None, :], mask=real, other=0.0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (token * HEADS + head) * SIZE + size, out.to(out_ptr.dtype.element_ty), mask=size < SIZE)
