"""Small kernels around projections: embed; add up, add the residual, normalise; SiLU.

The norm's weight is folded into the next projection, so what is left of RMSNorm is a division.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanofw.pdl import begin, wait


@triton.jit
def embed_kernel(
    token_ids_ptr,  # [T]
    table_ptr,  # [V, K]
    out_ptr,  # [T, K]
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's row, in blocks."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    token = tl.load(token_ids_ptr + row)
    tl.store(out_ptr + row * K + k, tl.load(table_ptr + token * K + k, mask=k < K), mask=k < K)


@triton.jit
def add_norm_kernel(
    hidden_ptr,  # [B, K], updated in place if PARTS > 0
    parts_ptr,  # [PARTS, B, K], added to it
    out_ptr,  # [B, K], normalised
    rows,
    eps,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: `hidden += sum(parts)`, then `out = hidden / rms(hidden)`."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K_PAD)
    mask = k < K
    wait(PDL)
    hidden = tl.load(hidden_ptr + row * K + k, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            hidden += tl.load(parts_ptr + (part * rows + row) * K + k, mask=mask, other=0.0).to(tl.float32)
        rounded = hidden.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * K + k, rounded, mask=mask)
        hidden = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / K + eps)
    tl.store(out_ptr + row * K + k, (hidden * scale).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(
    x_ptr,  # [B, 2N]: gate, then up
    out_ptr,  # [B, N]
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`silu(gate) * up`."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    gate = tl.load(x_ptr + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * N + n, out.to(out_ptr.dtype.element_ty), mask=n < N)
