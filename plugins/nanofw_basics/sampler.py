"""The default sampler: arg-max, temperature, top-k, top-p, seed, logprobs, in plain torch."""

from __future__ import annotations

import torch

from nanofw import draw
from nanofw.batch import Sampling
from nanofw.sampler import Sampled, Sampler


class DefaultSampler(Sampler):
    """All of `SamplingParams`, on any device."""

    batch_invariant_on = ("cpu",)  # torch's reductions on a GPU follow the alignment of a row

    def sample(self, logits: torch.Tensor, sampling: Sampling | None) -> Sampled:
        """Choose tokens; see the contract."""
        return draw.sample(logits, sampling)
