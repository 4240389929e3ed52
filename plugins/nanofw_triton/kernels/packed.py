"""Kernels that take the raw projections `[T, (Hq + 2 Hkv) D]`: head norm and rotation happen on the way.

Decode does everything in one launch. A program serves one request, one KV head and one split of its context. The G
query heads and the new key are rows of one tile, so one norm and one rotation serve all. The new key and value take
part from registers, and the first split stores them. Whatever earlier steps wrote (cache, lengths, block table) is
loaded before the wait for the kernel that makes the projections. When a context is split, the last program to finish
merges the parts, always in the order of the splits, so results are the same bits every time. A context too short for
all its splits leaves some without keys: they return at once.

Prefill prepares q and fills the cache; `prefill.py` and `decode.py` then attend.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanofw.pdl import begin, wait
from nanofw_triton.kernels.decode import LOG2_E, cap_scores


@triton.jit
def packed_decode_kernel(
    qkv_ptr,  # [B, (Hq + 2 Hkv) D]
    key_ptr,  # [N, BS, Hkv, D]
    value_ptr,
    out_ptr,  # [B, Hq D]
    partial_ptr,  # [SPLITS, B, Hq, D] float32; unused when not split
    lse_ptr,  # [SPLITS, B, Hq] float32, base 2; unused when not split
    arrived_ptr,  # [B Hkv] int32, zero between launches; unused when not split
    cos_ptr,  # [max_len, D] float32
    sin_ptr,
    q_norm_ptr,  # [D]; unused when there is no norm
    k_norm_ptr,
    seq_lens_ptr,  # [B]
    slots_ptr,  # [B]
    table_ptr,  # [B, M]
    requests_ptr,  # [B] int32, in which order; unused when in theirs
    scale,
    eps,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_h,
    table_stride,
    requests,  # B
    ALL: tl.constexpr,  # the requests in their own order
    NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # Hq
    GROUP: tl.constexpr,  # Hq / Hkv
    ROWS: tl.constexpr,  # GROUP + 1, padded
    SIZE: tl.constexpr,  # D
    SIZE_PAD: tl.constexpr,
    TILE: tl.constexpr,  # keys a loop turn
    STAGES: tl.constexpr,  # loop turns in flight
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # 0: none
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One split of one request's context for one KV head."""
    begin(PDL)
    kv_head, split, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(0)
    request = (index if ALL else tl.load(requests_ptr + index)).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    old = tl.maximum(seq_len - 1, 0)  # keys that earlier steps stored
    first = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0
    per_split = tl.cdiv(tl.cdiv(old - first, TILE), SPLITS) * TILE
    start = first + split * per_split
    end = tl.minimum(start + per_split, old)
    used = tl.maximum(tl.cdiv(old - first, tl.maximum(per_split, 1)), 1)
    if split >= used:
        return

    row = tl.arange(0, ROWS)[:, None]
    size = tl.arange(0, SIZE_PAD)[None, :]
    partner = tl.where(size < SIZE // 2, size + SIZE // 2, size - SIZE // 2)
    real = (row <= GROUP) & (size < SIZE)
    is_key = row == GROUP
    cos = tl.load(cos_ptr + old * SIZE + size, mask=size < SIZE, other=0.0)
    sin = tl.load(sin_ptr + old * SIZE + size, mask=size < SIZE, other=0.0)
    sin = tl.where(size < SIZE // 2, -sin, sin)
    weight = tl.full([ROWS, SIZE_PAD], 1.0, tl.float32)
    partner_weight = weight
    if NORM:
        q_weight = tl.load(q_norm_ptr + size, mask=size < SIZE, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + size, mask=size < SIZE, other=0.0).to(tl.float32)
        weight = tl.where(is_key, k_weight, q_weight)
        q_weight = tl.load(q_norm_ptr + partner, mask=size < SIZE, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + partner, mask=size < SIZE, other=0.0).to(tl.float32)
        partner_weight = tl.where(is_key, k_weight, q_weight)
    slot = tl.load(slots_ptr + request)

    table = table_ptr + request * table_stride
    k_at, loaded = _locate(table, start, end, kv_head, kv_stride_block, kv_stride_slot, kv_stride_h, BLOCK_SIZE, TILE)
    loaded = loaded & (size < SIZE)
    k = tl.load(key_ptr + k_at + size, mask=loaded, other=0.0)
    v = tl.load(value_ptr + k_at + size, mask=loaded, other=0.0)
    wait(PDL)

    head = tl.where(is_key, HEADS + kv_head, kv_head * GROUP + row)
    at = qkv_ptr + (request * (HEADS + 2 * kv_heads) + head) * SIZE
    x = tl.load(at + size, mask=real, other=0.0).to(tl.float32)
    turned = tl.load(at + partner, mask=real, other=0.0).to(tl.float32)
    v_at = qkv_ptr + (request * (HEADS + 2 * kv_heads) + HEADS + kv_heads + kv_head) * SIZE
    new_v = tl.load(v_at + size, mask=size < SIZE, other=0.0)
    if NORM:
        scale_row = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
        x = x * scale_row * weight
        turned = turned * scale_row * partner_weight
    q = (x * cos + turned * sin).to(k.dtype)
    new_k = tl.sum(tl.where(is_key, q.to(tl.float32), 0.0), axis=0)[None, :]  # exact: one row is not zero

    scores = tl.sum(q.to(tl.float32) * new_k, axis=1) * scale
    if SOFT_CAP > 0:
        scores = cap_scores(scores, SOFT_CAP)
    counts = (seq_len > 0) & (split == 0)
    top = tl.where(counts, scores * LOG2_E, float("-inf"))
    total = tl.where(counts, tl.full([ROWS], 1.0, tl.float32), 0.0)
    acc = tl.where(counts, new_v.to(tl.float32), 0.0) + tl.zeros([ROWS, SIZE_PAD], tl.float32)
    if (split == 0) & (slot >= 0):
        # the slot is int64, so block times stride is too
        to = (slot // BLOCK_SIZE) * kv_stride_block + (slot % BLOCK_SIZE) * kv_stride_slot + kv_head * kv_stride_h
        tl.store(key_ptr + to + size, new_k.to(k.dtype), mask=size < SIZE)
        tl.store(value_ptr + to + size, new_v, mask=size < SIZE)

    if start < end:
        top, total, acc = _attend(q, k, v, start, end, top, total, acc, scale, TILE, SOFT_CAP, PRECISION)
    for base in tl.range(start + TILE, end, TILE, num_stages=STAGES):
        k_at, loaded = _locate(
            table, base, end, kv_head, kv_stride_block, kv_stride_slot, kv_stride_h, BLOCK_SIZE, TILE
        )
        loaded = loaded & (size < SIZE)
        k = tl.load(key_ptr + k_at + size, mask=loaded, other=0.0)
        v = tl.load(value_ptr + k_at + size, mask=loaded, other=0.0)
        top, total, acc = _attend(q, k, v, base, end, top, total, acc, scale, TILE, SOFT_CAP, PRECISION)

    out = tl.where(total[:, None] > 0, acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    real = (row < GROUP) & (size < SIZE)
    query_head = kv_head * GROUP + tl.arange(0, ROWS)
    if SPLITS == 1:
        to = out_ptr + (request * HEADS + query_head[:, None]) * SIZE + size
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        to = (split * requests + request) * HEADS + query_head
        tl.store(partial_ptr + to[:, None] * SIZE + size, out, mask=real)
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + to, lse, mask=tl.arange(0, ROWS) < GROUP)
        tl.debug_barrier()  # all of this program's parts are stored before it is counted
        ticket = arrived_ptr + request * kv_heads + kv_head
        if tl.atomic_add(ticket, 1, sem="acq_rel") == used - 1:
            tl.store(ticket, 0)
            for g in tl.static_range(GROUP):
                nth = kv_head * GROUP + g
                _merge(partial_ptr, lse_ptr, out_ptr, request, nth, requests, used, HEADS, SIZE, SIZE_PAD, SPLITS)


@triton.jit
def _locate(
    table,
    base,
    end,
    kv_head,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_h,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where the keys at `base` and on lie: offsets `[TILE, 1]`, int64, and which are before `end`."""
    position = base + tl.arange(0, TILE)
    inside = position < end
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    at = block * kv_stride_block + (position % BLOCK_SIZE) * kv_stride_slot + kv_head * kv_stride_h
    return at[:, None], inside[:, None]


@triton.jit
def _attend(
    q,
    k,
    v,
    base,
    end,
    top,
    total,
    acc,
    scale,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One turn of the online softmax over a tile that holds at least one key."""
    inside = base + tl.arange(0, TILE) < end
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFT_CAP > 0:
        scores = cap_scores(scores, SOFT_CAP)
    scores = tl.where(inside[None, :], scores * LOG2_E, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total * shrink + tl.sum(weights, axis=1), acc


@triton.jit
def _merge(
    partial_ptr,
    lse_ptr,
    out_ptr,
    request,
    head,
    requests,
    used,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Weigh the `used` splits of one head by their share of the softmax, in their order.

    L1 may hold another layer's parts: read past it.
    """
    split = tl.arange(0, SPLITS)
    size = tl.arange(0, SIZE_PAD)[None, :]
    row = (split * requests + request) * HEADS + head
    lse = tl.load(lse_ptr + row, mask=split < used, other=float("-inf"), cache_modifier=".cg")
    real = (split < used)[:, None] & (size < SIZE)
    part = tl.load(partial_ptr + row[:, None] * SIZE + size, mask=real, other=0.0, cache_modifier=".cg")
    top = tl.max(lse, axis=0)
    share = tl.where(lse == float("-inf"), 0.0, tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top)))
    total = tl.sum(share, axis=0)
    out = tl.sum(part * share[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    to = out_ptr + (request * HEADS + head) * SIZE + size
    tl.store(to, out[None, :].to(out_ptr.dtype.element_ty), mask=size < SIZE)


@triton.jit
def prologue_kernel(
    qkv_ptr,  # [T, (Hq + 2 Hkv) D]
    q_ptr,  # [T, Hq, D], written
    key_ptr,  # [N, BS, Hkv, D]
    value_ptr,
    cos_ptr,  # [max_len, D] float32
    sin_ptr,
    q_norm_ptr,  # [D]; unused when there is no norm
    k_norm_ptr,
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    eps,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_h,
    NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,  # heads a program
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of one token: q is stored ready for attention, k and v go into the cache; slot -1 nowhere."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    size = tl.arange(0, SIZE_PAD)[None, :]
    partner = tl.where(size < SIZE // 2, size + SIZE // 2, size - SIZE // 2)
    real = (head < HEADS + 2 * KV_HEADS) & (size < SIZE)
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    cos = tl.load(cos_ptr + position * SIZE + size, mask=size < SIZE, other=0.0)
    sin = tl.load(sin_ptr + position * SIZE + size, mask=size < SIZE, other=0.0)
    sin = tl.where(size < SIZE // 2, -sin, sin)
    wait(PDL)
    at = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * SIZE
    raw = tl.load(at + size, mask=real, other=0.0)
    x = raw.to(tl.float32)
    turned = tl.load(at + partner, mask=real, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
        q_weight = tl.load(q_norm_ptr + size, mask=size < SIZE, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + size, mask=size < SIZE, other=0.0).to(tl.float32)
        x = x * scale * tl.where(is_q, q_weight, k_weight)
        q_weight = tl.load(q_norm_ptr + partner, mask=size < SIZE, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + partner, mask=size < SIZE, other=0.0).to(tl.float32)
        turned = turned * scale * tl.where(is_q, q_weight, k_weight)
    out = (x * cos + turned * sin).to(raw.dtype)
    tl.store(q_ptr + (token * HEADS + head) * SIZE + size, out, mask=real & is_q)
    # the slot is int64, so block times stride is too
    to = (slot // BLOCK_SIZE) * kv_stride_block + (slot % BLOCK_SIZE) * kv_stride_slot + size
    stored = real & (slot >= 0)
    tl.store(key_ptr + to + (head - HEADS) * kv_stride_h, out, mask=stored & ~is_q & ~is_v)
    tl.store(value_ptr + to + (head - HEADS - KV_HEADS) * kv_stride_h, raw, mask=stored & is_v)
