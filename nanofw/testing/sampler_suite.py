"""The conformance suite of a sampler.

On one of your own:

    from nanofw.testing import SamplerSuite

    class TestMySampler(SamplerSuite):
        backend = MySampler

A row's token may depend on its seed, its position and its logits alone; greedy is the first of the largest; no
temperature overflows; and drawn tokens follow the distribution that was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from nanofw.batch import Sampling
from nanofw.options import build_options
from nanofw.sampler import Sampled, Sampler
from nanofw.testing.count_laws import CountLaws
from nanofw.testing.suite import cases

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TINY = (0.0, 1e-6, 1e-5, 1e-4, 1e-3)
CHI_SQUARE_7_DF = 24.32
"""A right sampler exceeds it once in a thousand seeds; the seeds here are fixed."""


class SamplerSuite(CountLaws):
    """A token depends on its own row alone, and follows the distribution that was asked for.

    Attributes a subclass sets:
        backend: the sampler's class.
        device: where to test it; the environment's `NANOFW_TEST_DEVICE` if not given, else the CPU.
        draws: tokens that are drawn to compare with a distribution; fewer for a backend in an interpreter.
    """

    backend: ClassVar[type[Sampler]]
    device: ClassVar[str | None] = None
    draws: ClassVar[int] = 4096

    def sample(self, logits: torch.Tensor, rows: Sequence[dict[str, Any]] | None, logprobs: int = -1) -> Sampled:
        """Tokens of `logits` `[B, V]`; each row's parameters, what is not named being plain greedy with seed 0."""
        if reason := self.backend.unavailable():
            pytest.skip(f"{self.backend.__name__} is unavailable here: {reason}")
        device = torch.device(self.device or os.environ.get("NANOFW_TEST_DEVICE") or "cpu")
        sampler = self.backend(build_options(self.backend.Options, self.options, self.backend.__name__))
        with torch.inference_mode():
            return sampler.sample(logits.to(device), None if rows is None else sampling(rows, logprobs).to(device))

    def tokens(self, logits: torch.Tensor, rows: Sequence[dict[str, Any]] | None) -> list[int]:
        """Only the tokens; they must be `[B]` int64."""
        found = self.sample(logits, rows).tokens
        if found.shape != logits.shape[:1] or found.dtype != torch.int64:
            raise AssertionError(f"tokens are {tuple(found.shape)} {found.dtype}, must be [{len(logits)}] int64")
        return [int(token) for token in found.tolist()]

    @cases(lambda suite: DTYPES)
    def test_greedy_takes_the_first_of_the_largest(self, case: str) -> None:
        """Arg-max, exact ties by the lower id, at both ends of a vocabulary of awkward size.

        Fails if ties fall by chance, or a vocabulary that is no multiple of a tile is cut. Sources: the contract;
        nano-vllm#249, where temperature 0 was not allowed.
        """
        logits = torch.zeros(4, 4099, dtype=DTYPES[case])
        logits[1, [77, 4000]] = 3.0
        logits[2, 4098] = 1.0
        logits[3, 0] = 1.0
        assert self.tokens(logits, None) == [0, 77, 4098, 0]
        assert self.tokens(logits, [{}, {}, {}, {}]) == [0, 77, 4098, 0]

    @cases(lambda suite: DTYPES)
    def test_tiny_temperatures_take_the_largest(self, case: str) -> None:
        """Logits of 11 and 40 at temperatures down to 1e-6, beside rows at 1.0.

        Fails if logits divided by a temperature overflow, or one row changes what others get. Source: vllm#3063.
        """
        logits = torch.randn(2 * len(TINY), 300, generator=generator(1)).to(DTYPES[case])
        best = torch.arange(len(logits)) * 13 + 7
        logits[torch.arange(len(logits)), best] = torch.tensor([11.0, 40.0] * len(TINY)).to(DTYPES[case])
        tiny = [{"temperature": t, "seed": 3} for t in TINY for _ in range(2)]
        assert self.tokens(logits, tiny) == best.tolist()
        warm = torch.randn(1, 300, generator=generator(2)).to(DTYPES[case])
        row = {"temperature": 1.0, "seed": 5, "position": 9}
        mixed = self.tokens(torch.cat((logits, warm)), [*tiny, row])
        assert mixed == [*best.tolist(), *self.tokens(warm, [row])]

    @cases(lambda suite: (0, -1, 5, 300, 10_000))
    def test_top_k_of_none_some_and_more_than_there_are(self, case: int) -> None:
        """0 and -1 are off; more than the vocabulary is all of it.

        Fails if one of them raises, or always gives id 0, which is not the arg-max here. Sources: nanochat#466,
        ohdearquant/lattice#225.
        """
        logits = torch.randn(64, 300, generator=generator(3))
        logits[:, 123] = 9.0
        rows = [{"temperature": 2.0, "top_k": case, "seed": i} for i in range(64)]
        found = self.tokens(logits, rows)
        if 0 < case < 300:
            kept = logits.topk(case, dim=-1).indices
            assert all(token in kept[i] for i, token in enumerate(found))
        else:
            assert found == self.tokens(logits, [row | {"top_k": 0} for row in rows])
        assert len(set(found)) > 1
        assert self.tokens(logits, [row | {"top_k": 1} for row in rows]) == [123] * 64

    def test_top_p_keeps_the_least_that_reaches_the_mass(self) -> None:
        """Probabilities of 0.5, 0.3, 0.15 and 0.05: what is kept at each top_p, and that all of it is drawn.

        Fails if the token that reaches the mass is dropped, or the one after it kept. Source: nucleus sampling
        (Holtzman et al., ICLR 2020).
        """
        logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().expand(400, 4)
        for top_p, kept in ((0.4, {1}), (0.6, {1, 3}), (0.9, {0, 1, 3}), (1.0, {0, 1, 2, 3})):
            rows = [{"temperature": 1.0, "top_p": top_p, "seed": i} for i in range(400)]
            assert set(self.tokens(logits, rows)) == kept, f"top_p={top_p}"

    def test_company_and_place_change_no_token(self) -> None:
        """A row alone, in any company, and anywhere in the batch.

        Fails if rows share a stream of random numbers. Source: counter-based random numbers (Salmon et al., SC 2011).
        """
        logits = torch.randn(7, 500, generator=generator(4))
        rows: list[dict[str, Any]] = [
            {"temperature": 1.0, "seed": 1},
            {},
            {"temperature": 0.7, "top_k": 9, "seed": -5, "position": 3},
            {"temperature": 1.3, "top_p": 0.8, "seed": 2**62, "position": 1},
            {"temperature": 1.0, "seed": 1, "position": 4},
            {"temperature": 1e-5},
            {"temperature": 5.0, "seed": 9},
        ]
        together = self.tokens(logits, rows)
        for i, row in enumerate(rows):
            assert self.tokens(logits[i : i + 1], [row]) == together[i : i + 1], f"row {i} alone"
        assert self.tokens(logits.flip(0), rows[::-1]) == together[::-1]

    @cases(lambda suite: (1, 3))
    def test_company_changes_no_bit(self, case: int) -> None:
        """Batch invariance, where it is declared: log-probabilities too, with so many threads (on a CPU).

        Vocabularies are large enough for a row of its own to be cut into parts that threads sum up. Fails if the order
        of a sum depends on the rows beside it. Source: transformers#25921.
        """
        device = torch.device(self.device or os.environ.get("NANOFW_TEST_DEVICE") or "cpu").type
        if device not in self.backend.batch_invariant_on:
            pytest.skip(f"{self.backend.__name__} does not declare batch invariance on {device}")
        threads = torch.get_num_threads()
        torch.set_num_threads(case)
        try:
            for vocab in (300, 4099, 151_936):
                self._check_bits(torch.randn(9, vocab, generator=generator(7)) * 3)
        finally:
            torch.set_num_threads(threads)

    def _check_bits(self, logits: torch.Tensor) -> None:
        rows: list[dict[str, Any]] = [
            {"temperature": (0.0, 1.0, 0.7)[i % 3], "top_k": (0, 0, 50)[i % 3], "top_p": (1.0, 0.9)[i % 2], "seed": i}
            for i in range(len(logits))
        ]
        together = self.sample(logits, rows, logprobs=5)
        for i, row in enumerate(rows):
            alone = self.sample(logits[i : i + 1].clone(), [row], logprobs=1 + i % 5)
            for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
                one, other = getattr(alone, name)[0], getattr(together, name)[i]
                what = f"row {i} of {len(rows)}, vocabulary of {logits.shape[1]}"
                assert torch.equal(one, other[: len(one)] if one.ndim else other), f"{what}: {name} have other bits"

    def test_seed_and_position_decide(self) -> None:
        """The same twice is the same token; another seed or position is another draw.

        Fails if a request that is put back draws other tokens. Source: the contract.
        """
        logits = torch.zeros(1, 1000)
        draws = {
            (s, p): self.tokens(logits, [{"temperature": 1.0, "seed": s, "position": p}])[0]
            for s in (0, 1, -1)
            for p in (1, 2, 3)
        }
        assert len(set(draws.values())) > 6
        for (seed, position), token in draws.items():
            assert self.tokens(logits, [{"temperature": 1.0, "seed": seed, "position": position}]) == [token]

    @cases(lambda suite: (0.5, 1.0, 2.0))
    def test_draws_follow_the_distribution(self, case: float) -> None:
        """`draws` tokens out of 8, by chi-square; so over positions of one seed as over seeds.

        Fails for wrong probabilities, and for seeds or positions whose draws hang together. Source: Pearson's test,
        1900.
        """
        logits = torch.linspace(-1.0, 1.0, 8)
        expected = (logits / case).softmax(0).double() * self.draws
        for vary in ("seed", "position"):
            rows = [{"temperature": case, "seed": 11, vary: i} for i in range(self.draws)]
            counts = torch.tensor(self.tokens(logits.expand(self.draws, 8), rows)).bincount(minlength=8)
            statistic = ((counts - expected) ** 2 / expected).sum().item()
            assert statistic < CHI_SQUARE_7_DF, f"{counts.tolist()} instead of {expected.round().tolist()} over {vary}s"

    @cases(lambda suite: (1, 5, 20))
    def test_logprobs_do_not_depend_on_how_many_are_asked_for(self, case: int) -> None:
        """The chosen token's, whatever its temperature, and the likeliest ones in order.

        Fails if they are those of the logits after temperature or cut, or differ with their number. Source: vllm#44319.
        """
        logits = torch.randn(3, 50, generator=generator(6)) * 3
        rows: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.5, "top_k": 3, "seed": 8}]
        found = self.sample(logits, rows, logprobs=case)
        expected = logits.double().log_softmax(-1)
        assert found.logprobs is not None
        assert found.top_ids is not None
        assert found.top_logprobs is not None
        chosen = expected.gather(1, found.tokens.cpu()[:, None])[:, 0]
        torch.testing.assert_close(found.logprobs.cpu().double(), chosen, atol=1e-5, rtol=0)
        values, ids = expected.topk(case, dim=-1)
        assert torch.equal(found.top_ids.cpu(), ids)
        torch.testing.assert_close(found.top_logprobs.cpu().double(), values, atol=1e-5, rtol=0)

    def test_tokens_that_are_ruled_out_are_never_drawn(self) -> None:
        """Logits of minus infinity have no mass, at the ends of the vocabulary too.

        Fails if a number at either end of [0, 1) falls on a token without mass. Source: the contract.
        """
        logits = torch.full((256, 37), float("-inf"))
        logits[:, [5, 30]] = torch.tensor([0.0, 1.0])
        rows = [{"temperature": 3.0, "seed": i} for i in range(256)]
        assert set(self.tokens(logits, rows)) == {5, 30}


def sampling(rows: Sequence[dict[str, Any]], logprobs: int = -1) -> Sampling:
    """Host-side parameters as the engine packs them."""
    import numpy as np

    def column(name: str, default: float, dtype: Any) -> Any:
        return np.array([row.get(name, default) for row in rows], dtype=dtype)

    temperature, top_k, top_p = column("temperature", 0, "f4"), column("top_k", 0, "i8"), column("top_p", 1, "f4")
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=column("seed", 0, "i8"),
        position=column("position", 1, "i8"),
        greedy=not temperature.any(),
        truncated=bool((top_k > 0).any() or (top_p < 1).any()),
        logprobs=logprobs,
    )


def generator(seed: int) -> torch.Generator:
    """Numbers that do not depend on other tests."""
    return torch.Generator().manual_seed(seed)
