"""Sort requests by length on the device: a graph replays this with the lengths of each step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_kernel(
    seq_lens_ptr,  # [B] int32
    order_ptr,  # [B] int32, written: requests, the longest context first, equal ones in their order
    requests,  # B
    ROWS: tl.constexpr,
    REQUESTS_PAD: tl.constexpr,
):
    """Each request goes to the place that as many others have a right to be before."""
    mine, other = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, REQUESTS_PAD)[None, :]
    length = tl.load(seq_lens_ptr + mine, mask=mine < requests, other=0)
    others = tl.load(seq_lens_ptr + other, mask=other < requests, other=-1)
    before = (others > length) | ((others == length) & (other < mine))
    place = tl.sum(before.to(tl.int32), axis=1)[:, None]
    tl.store(order_ptr + place, mine, mask=mine < requests)
