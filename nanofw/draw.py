"""The arithmetic of sampling in torch, which samplers share: every parameter, the whole batch at once.

A random choice is the inverse of the cumulative distribution at one number u in [0, 1): the first token at which the
running sum of probabilities exceeds u. One number a row is enough, and it is a hash of (seed, position), so a row's
token has nothing to do with its company, with its place in the batch, or with how often it was recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanofw.sampler import Sampled

if TYPE_CHECKING:
    from nanofw.batch import Sampling

MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN = 0x9E3779B97F4A7C15


def sample(logits: torch.Tensor, sampling: Sampling | None) -> Sampled:
    """What `Sampler.sample` promises, in float32 whatever the logits are."""
    greedy = logits.argmax(dim=-1)
    if sampling is None:
        return Sampled(greedy)
    logits = logits.float()
    tokens = greedy
    if not sampling.greedy:
        u = uniform(sampling.seed, sampling.position)
        drawn = draw_truncated(logits, sampling, u) if sampling.truncated else draw(logits, sampling.temperature, u)
        tokens = torch.where(sampling.temperature > 0, drawn, greedy)
    return with_logprobs(tokens, logits, sampling)


def with_logprobs(tokens: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> Sampled:
    """`tokens` `[B]` with the log-probabilities that the rows asked for."""
    if sampling.logprobs < 0:
        return Sampled(tokens)
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(sampling.logprobs, logits.shape[-1]), dim=-1)
    return Sampled(tokens, logprobs.gather(-1, tokens[:, None])[:, 0], top.indices, top.values)


def draw(logits: torch.Tensor, temperature: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Tokens `[B]` from logits `[B, V]` float32 at temperatures `[B]`."""
    return _invert(_probabilities(logits, temperature), u)


def draw_truncated(logits: torch.Tensor, sampling: Sampling, u: torch.Tensor) -> torch.Tensor:
    """Cut the tail by rank (top-k) and by the mass that comes before a token (top-p), and draw.

    The draw runs over the vocabulary in its own order, as `draw` does: a row that cuts nothing gets the same token
    whether or not another one does.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    probs = _probabilities(ordered, sampling.temperature)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])
    probs = probs * (rank < top_k[:, None])
    # top-p counts the mass among the tokens that top-k has kept, as sampling from them would.
    mass = probs.cumsum(dim=-1)  # its end is the sum, in an order that has nothing to do with how many rows there are
    keep = (probs > 0) & (mass - probs < sampling.top_p[:, None] * mass[:, -1:])
    keep[:, 0] = True
    keep |= ((top_k >= logits.shape[-1]) & (sampling.top_p >= 1))[:, None]
    kept = torch.empty_like(keep).scatter_(-1, ids, keep)
    return _invert(_probabilities(logits, sampling.temperature) * kept, u)


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) for each (seed, position): the SplitMix64 finaliser over both (Steele et al., OOPSLA 2014).

    Args:
        seed, position: `[B]` int64.

    Returns:
        `[B]` float64, multiples of 2**-53.
    """
    bits = _mix(_mix(seed + signed(GOLDEN)) + position * signed(GOLDEN))
    return _shift_right(bits, 11).double() * 2.0**-53


def signed(word: int) -> int:
    """An unsigned 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Softmax at a temperature. The maximum is taken off first: dividing by a tiny temperature must not overflow."""
    below_max = logits - logits.amax(dim=-1, keepdim=True)
    return (below_max / torch.where(temperature > 0, temperature, 1.0)[:, None]).softmax(dim=-1)


def _invert(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """First index at which the running sum exceeds `u` times the total. A token of weight 0 is never chosen.

    Args:
        weights: `[B, V]` float32, not normalised. u: `[B]` float64 in [0, 1).
    """
    total = weights.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(total, (u * total[:, -1])[:, None], right=True)[:, 0]
    return index.clamp(max=weights.shape[-1] - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * signed(MIX[0])
    x = (x ^ _shift_right(x, 27)) * signed(MIX[1])
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
