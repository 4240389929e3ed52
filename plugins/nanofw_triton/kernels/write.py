"""Store a step's K and V in their slots, both in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kernel(
    k_ptr,  # [T, Hkv, D]
    v_ptr,
    key_ptr,  # [N, BS, Hkv, D]
    value_ptr,
    slots_ptr,  # [T] int64
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_h,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):
    """One token; slot -1 is written nowhere."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    head = tl.arange(0, KV_HEADS_PAD)[:, None]
    size = tl.arange(0, SIZE_PAD)[None, :]
    mask = (head < KV_HEADS) & (size < SIZE) & (slot >= 0)
    k = tl.load(k_ptr + token * k_stride_t + head * k_stride_h + size, mask=mask)
    v = tl.load(v_ptr + token * v_stride_t + head * v_stride_h + size, mask=mask)
    # The slot is int64, so block times stride is too.
    at = (slot // BLOCK_SIZE) * kv_stride_block + (slot % BLOCK_SIZE) * kv_stride_slot + head * kv_stride_h + size
    tl.store(key_ptr + at, k, mask=mask)
    tl.store(value_ptr + at, v, mask=mask)
