"""My own sampler.

Begin at the sort: it orders the whole vocabulary of every row, though few rows cut its tail, and deep. Randomness is a
number for each (seed, position), never the next one of a stream: so a token depends on nothing but its own row.
"""

from __future__ import annotations

from typing import Any

import torch

import nanofw
from nanofw import Sampled, Sampler, Sampling, draw

nanofw_api = (1, 0)


class MySampler(Sampler):
    """Arg-max, or a draw from the tail-cut distribution, all rows at once."""

    def sample(self, logits: torch.Tensor, sampling: Sampling | None) -> Sampled:
        """Tokens `[B]` of logits `[B, V]`."""
        tokens = logits.argmax(dim=-1)
        if sampling is None:  # every row is greedy, and nobody asked for log-probabilities
            return Sampled(tokens)
        logits = logits.float()
        if not sampling.greedy:
            tokens = torch.where(sampling.temperature > 0, self.draw(logits, sampling), tokens)
        return draw.with_logprobs(tokens, logits, sampling)

    def draw(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """The first token, from the likeliest down, at which the running sum of probabilities exceeds u."""
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
        warm = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
        probs = ((ordered - ordered[:, :1]) / warm).softmax(dim=-1)  # less the maximum: no temperature overflows
        rank, vocab = torch.arange(logits.shape[1], device=logits.device), logits.shape[1]
        probs = probs * (rank < torch.where(sampling.top_k > 0, sampling.top_k, vocab)[:, None])
        before = probs.cumsum(dim=-1) - probs
        probs = probs * (before < sampling.top_p[:, None] * probs.sum(dim=-1, keepdim=True))
        mass = probs.cumsum(dim=-1, dtype=torch.float64)
        u = draw.uniform(sampling.seed, sampling.position)[:, None]
        index = torch.searchsorted(mass, u * mass[:, -1:], right=True).clamp(max=vocab - 1)
        return ids.gather(-1, index)[:, 0]


@nanofw.hookimpl
def nanofw_register_sampler(register: Any) -> None:
    """Tell nanofw the name."""
    register("my-sampler", MySampler)
