"""Choose tokens in two launches, without writing anything of the vocabulary's size.

The first looks at chunks of a row: the largest logit and where it is, and the sum of exp((logit - largest) / T). The
second looks at a row's chunks. The arg-max is the first of the largest. A drawn token is where the running sum of
probabilities exceeds u times their total: first the chunk, by the chunks' sums, then the token in it. The arithmetic is
that of `nanofw.draw`; u is the same number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanofw.draw import GOLDEN, MIX

GOLDEN_ = tl.constexpr(GOLDEN)
MIX_0, MIX_1 = tl.constexpr(MIX[0]), tl.constexpr(MIX[1])


@triton.jit
def chunk_kernel(
    logits_ptr,  # [B, V]
    top_ptr,  # [B, CHUNKS] float32
    where_ptr,  # [B, CHUNKS] int32
    mass_ptr,  # [B, CHUNKS] float32; unused when GREEDY
    temperature_ptr,  # [B] float32; unused when GREEDY
    stride,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """One chunk of one row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    top = tl.max(logits, axis=0)
    where = tl.min(tl.where(logits == top, token, V), axis=0)  # V if nothing compares: a row of NaN
    at = row * tl.num_programs(1) + chunk
    tl.store(top_ptr + at, top)
    tl.store(where_ptr + at, where)
    if not GREEDY:
        tl.store(mass_ptr + at, tl.sum(_weights(logits, top, tl.load(temperature_ptr + row)), axis=0))


@triton.jit
def choose_kernel(
    logits_ptr,
    top_ptr,
    where_ptr,
    mass_ptr,
    temperature_ptr,
    seed_ptr,  # [B] int64
    position_ptr,  # [B] int64
    tokens_ptr,  # [B] int64, written
    stride,
    chunks,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PAD)
    real = chunk < chunks
    tops = tl.load(top_ptr + row * chunks + chunk, mask=real, other=float("-inf"))
    where = tl.load(where_ptr + row * chunks + chunk, mask=real, other=V)
    top = tl.max(tops, axis=0)
    token = tl.min(tl.where(tops == top, where, V), axis=0)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            mass = tl.load(mass_ptr + row * chunks + chunk, mask=real, other=0.0)
            mass = (mass * _weights(tops, top, temperature)).to(tl.float64)
            sums = tl.cumsum(mass, axis=0)
            target = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row)) * tl.sum(mass, axis=0)
            # rounding may leave the target at the very end: then the last chunk with any mass
            last = tl.max(tl.where(mass > 0, chunk, 0), axis=0)
            chosen = tl.minimum(tl.min(tl.where(sums > target, chunk, CHUNKS_PAD), axis=0), last)
            before = tl.sum(tl.where(chunk < chosen, mass, 0.0), axis=0)
            inner = chosen * CHUNK + tl.arange(0, CHUNK)
            logits = tl.load(logits_ptr + row * stride + inner, mask=inner < V, other=float("-inf")).to(tl.float32)
            weights = _weights(logits, top, temperature).to(tl.float64)
            running = before + tl.cumsum(weights, axis=0)
            last = tl.max(tl.where(weights > 0, inner, 0), axis=0)
            token = tl.minimum(tl.min(tl.where((running > target) & (weights > 0), inner, V), axis=0), last)
    tl.store(tokens_ptr + row, tl.minimum(token, V - 1).to(tl.int64))


@triton.jit
def _weights(logits, top, temperature):
    """exp((logits - top) / T), at T = 1 where T is 0: such a row takes the arg-max. Nothing overflows at a tiny T."""
    below = logits - tl.where(top == float("-inf"), 0.0, top)
    return tl.exp(below / tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def _uniform(seed, position):
    """`nanofw.draw.uniform`."""
    bits = _mix(_mix(seed.to(tl.uint64) + GOLDEN_) + position.to(tl.uint64) * GOLDEN_)
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * MIX_0
    x = (x ^ (x >> 27)) * MIX_1
    return x ^ (x >> 31)
