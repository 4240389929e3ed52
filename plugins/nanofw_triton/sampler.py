"""`triton`: arg-max and temperature in two launches; what needs a sorted vocabulary goes the way of `nanofw.draw`."""

from __future__ import annotations

import torch
import triton

from nanofw import draw
from nanofw.batch import Sampling
from nanofw.launch import launch, no_triton
from nanofw.sampler import Sampled, Sampler
from nanofw_triton.kernels.sample import choose_kernel, chunk_kernel

CHUNK = 4096


class TritonSampler(Sampler):
    """The tokens of the default sampler, but for rounding at the edge between two tokens."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Needs Triton."""
        return no_triton()

    def sample(self, logits: torch.Tensor, sampling: Sampling | None) -> Sampled:
        """Choose tokens; see the contract."""
        if sampling is None:
            return Sampled(self._choose(logits, None))
        if sampling.truncated and not sampling.greedy:
            return draw.sample(logits, sampling)
        tokens = self._choose(logits, None if sampling.greedy else sampling)
        return draw.with_logprobs(tokens, logits, sampling)

    @staticmethod
    def _choose(logits: torch.Tensor, sampling: Sampling | None) -> torch.Tensor:
        rows, vocab = logits.shape
        chunks, device = triton.cdiv(vocab, CHUNK), logits.device
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        top = torch.empty((rows, chunks), dtype=torch.float32, device=device)
        where = torch.empty((rows, chunks), dtype=torch.int32, device=device)
        mass, temperature, seed, position = top, top, tokens, tokens  # stand-ins, not read
        if sampling is not None:
            mass = torch.empty_like(top)
            temperature, seed, position = sampling.temperature, sampling.seed, sampling.position
        shared = {"V": vocab, "CHUNK": CHUNK, "GREEDY": sampling is None}
        stride = logits.stride(0)
        launch(chunk_kernel, (rows, chunks), logits, top, where, mass, temperature, stride, **shared)
        launch(
            choose_kernel,
            (rows,),
            logits,
            top,
            where,
            mass,
            temperature,
            seed,
            position,
            tokens,
            stride,
            chunks,
            CHUNKS_PAD=triton.next_power_of_2(chunks),
            **shared,
        )
        return tokens
