"""Projections of some dozens of rows: a pipelined tile product, K optionally split so that every multiprocessor works.

A split writes float32 partials `[splits, B, N]`; whoever reads them next adds them up (`norm.py`), which costs nothing
extra there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanofw.pdl import begin, wait


@triton.jit
def tiled_kernel(
    x_ptr,  # [B, K]
    w_ptr,  # [N, K], or [2N, K] when gated
    out_ptr,  # [B, N], or [SPLITS, B, N] float32
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of `x @ W.T`, or of `silu(gate) * up`."""
    begin(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    k0 = split * (K // SPLITS)
    k_inner = tl.arange(0, BK)
    real_n = (n < N)[:, None]
    real_row = (row < rows)[:, None]
    wait(PDL)
    acc = tl.zeros([BM, BN], tl.float32)
    acc_up = tl.zeros([BM, BN], tl.float32)
    for step in tl.range(0, K // SPLITS, BK, num_stages=STAGES):
        k = k0 + step + k_inner[None, :]
        inside = k < k0 + K // SPLITS
        x = tl.load(x_ptr + row[:, None] * K + k, mask=real_row & inside, other=0.0)
        w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k, mask=real_n & inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(w_ptr + (n.to(tl.int64)[:, None] + N) * K + k, mask=real_n & inside, other=0.0)
            acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision=PRECISION)
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    at = (split * rows + row)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=real_row & (n < N)[None, :])
