"""The default sampler passes the conformance suite, and the suite finds planted faults (A9)."""

from dataclasses import replace

import pytest
import torch

from nanofw import draw
from nanofw.sampler import Sampled, Sampler
from nanofw.testing.sampler_suite import SamplerSuite
from nanofw_basics.sampler import DefaultSampler


class TestDefaultSampler(SamplerSuite):
    backend = DefaultSampler


class HalfPrecision(Sampler):
    """Divides by the temperature in the logits' own dtype."""

    def sample(self, logits, sampling):
        if sampling is None or sampling.greedy:
            return draw.sample(logits, sampling)
        scaled = logits / torch.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None].to(logits.dtype)
        u = draw.uniform(sampling.seed, sampling.position)
        drawn = draw.draw(scaled.float().nan_to_num(posinf=65504.0), torch.ones_like(sampling.temperature), u)
        return Sampled(torch.where(sampling.temperature > 0, drawn, logits.argmax(-1)))


class SharedStream(Sampler):
    """Draws from one stream of random numbers for the whole batch."""

    def sample(self, logits, sampling):
        if sampling is None or sampling.greedy:
            return draw.sample(logits, sampling)
        u = torch.rand(len(logits), dtype=torch.float64)
        return Sampled(draw.draw(logits.float(), sampling.temperature, u))


class ForgetsPosition(Sampler):
    """The same number at every position of a request."""

    def sample(self, logits, sampling):
        if sampling is not None:
            sampling = sampling.__class__(
                **{f: getattr(sampling, f) for f in sampling.__slots__}
                | {"position": torch.zeros_like(sampling.position)}
            )
        return draw.sample(logits, sampling)


class LastOfTies(Sampler):
    """Takes the last of the largest."""

    def sample(self, logits, sampling):
        flipped = logits.flip(-1).argmax(-1)
        return Sampled(logits.shape[-1] - 1 - flipped)


class SharesAMaximum(Sampler):
    """Right, and declares batch invariance; but takes the maximum of the whole batch off, which rounds otherwise."""

    batch_invariant_on = ("cpu",)

    def sample(self, logits, sampling):
        return draw.sample(logits.float() - logits.max(), sampling)


class SumsInParts(DefaultSampler):
    """The mass of the tail summed by `sum`, which threads share when there is one row."""

    def sample(self, logits, sampling):
        found = super().sample(logits, sampling)
        mass = logits.float().softmax(-1).sum(-1)
        return replace(found, logprobs=found.logprobs - mass.log())


@pytest.mark.parametrize(
    ("faulty", "check"),
    [
        (SharesAMaximum, "test_company_changes_no_bit"),
        (SumsInParts, "test_company_changes_no_bit"),
        (HalfPrecision, "test_tiny_temperatures"),
        (SharedStream, "test_company"),
        (ForgetsPosition, "test_draws_follow"),
        (LastOfTies, "test_greedy"),
    ],
)
def test_planted_faults_are_found(faulty, check):
    class Suite(SamplerSuite):
        backend = faulty

    Suite.__test__ = False

    def run():
        for _, test in Suite.checks(check):
            test()

    with pytest.raises(AssertionError):
        run()
