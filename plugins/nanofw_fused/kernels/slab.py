"""Projections of a few rows: every weight is read once, and all of a program's weights before its inputs are ready.

With a batch of at most 16 a projection is bound by reading its weights. A program owns a slab of BN output features and
the whole of K. It asks for the slab before it waits for its predecessor, so the memory system is busy across the
boundary between kernels. The batch is the narrow side of the product, and the product is three-dimensional, one slice
of K a warp, so that no warp computes or loads what another does.

Optionally the input is RMS-normalised on the way: the norm's weight is folded into W beforehand, and 1/rms, a factor a
row, is applied to the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanofw.pdl import begin, wait


@triton.jit
def slab_kernel(
    x_ptr,  # [B, K]
    w_ptr,  # [N, K], or [2N, K] when gated: gate rows, then up rows
    residual_ptr,  # [B, N], read if RESIDUAL
    out_ptr,  # [B, N]
    rows,  # B
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,  # B padded to 8 or 16
    BN: tl.constexpr,
    SLICES: tl.constexpr,  # of K, one a warp
    KC: tl.constexpr,  # elements of K a slice and chunk
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,  # slabs and slices divide N and K without rest
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`out = residual + norm(x) @ W.T`, or `silu(gate) * up` of the two halves."""
    begin(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    slice_k = tl.arange(0, SLICES)[:, None, None] * KC
    k_inner = tl.arange(0, KC)
    w_row = n.to(tl.int64)[None, :, None] * K
    w = ()
    up = ()
    for chunk in tl.static_range(CHUNKS):
        k = chunk * SLICES * KC + slice_k + k_inner[None, None, :]
        if EVEN:
            w = w + (tl.load(w_ptr + w_row + k),)
            if GATED:
                up = up + (tl.load(w_ptr + w_row + N * K + k),)
        else:
            mask = (k < K) & (n < N)[None, :, None]
            w = w + (tl.load(w_ptr + w_row + k, mask=mask, other=0.0),)
            if GATED:
                up = up + (tl.load(w_ptr + w_row + N * K + k, mask=mask, other=0.0),)
    row = tl.arange(0, ROWS)
    out_mask = (n < N)[:, None] & (row < rows)[None, :]
    out_at = row[None, :] * N + n[:, None]
    wait(PDL)

    if RESIDUAL:
        residual = tl.load(residual_ptr + out_at, mask=out_mask, other=0.0)
    acc = tl.zeros([SLICES, BN, ROWS], tl.float32)
    acc_up = tl.zeros([SLICES, BN, ROWS], tl.float32)
    squares = tl.zeros([SLICES, ROWS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        k = chunk * SLICES * KC + slice_k + k_inner[None, :, None]
        real = (row < rows)[None, None, :] if EVEN else (k < K) & (row < rows)[None, None, :]
        x = tl.load(x_ptr + row[None, None, :] * K + k, mask=real, other=0.0)
        acc = tl.dot(w[chunk], x, acc, input_precision=PRECISION)
        if GATED:
            acc_up = tl.dot(up[chunk], x, acc_up, input_precision=PRECISION)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)

    result = tl.sum(acc, axis=0)  # [BN, ROWS]
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        result = result * scale[None, :]
    if GATED:
        second = tl.sum(acc_up, axis=0)
        if NORM:
            second = second * scale[None, :]
        result = result / (1.0 + tl.exp(-result)) * second
    if RESIDUAL:
        result += residual.to(tl.float32)
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=out_mask)
