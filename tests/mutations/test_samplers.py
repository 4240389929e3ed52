"""Faults planted into the default sampler: the suite must find each, and say why."""

from dataclasses import replace

import pytest
import torch

from nanofw import draw
from nanofw.sampler import Sampled
from nanofw.testing import SamplerSuite
from nanofw.testing.planted import Faults
from nanofw_basics.sampler import DefaultSampler

faults = Faults(SamplerSuite)


class Drawing(DefaultSampler):
    """The default sampler, in pieces: a fault may change the parameters, the logits, or the number that is drawn."""

    def sample(self, logits, sampling):
        if sampling is None:
            return super().sample(logits, sampling)
        return super().sample(self.logits(logits, sampling), self.parameters(sampling))

    def logits(self, logits, sampling):
        return logits

    def parameters(self, sampling):
        return sampling


@faults.plant("test_tiny_temperatures_take_the_largest[fp16]", r"assert \[.*\] == \[")
class DividesInHalfPrecision(Drawing):
    """A9: vllm#3063."""

    def logits(self, logits, sampling):
        scaled = logits / torch.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None].to(logits.dtype)
        return scaled.float().nan_to_num(posinf=65504.0)

    def parameters(self, sampling):
        return replace(sampling, temperature=(sampling.temperature > 0).float())


@faults.plant("test_greedy_takes_the_first_of_the_largest*", r"assert \[4098, 4000, 4098, 0\] == \[0, 77, 4098, 0\]")
class TakesTheLastOfTies(DefaultSampler):
    def sample(self, logits, sampling):
        return Sampled(logits.shape[-1] - 1 - logits.flip(-1).argmax(-1))


@faults.plant("test_company_and_place_change_no_token", "row 0 alone")
class DrawsFromOneStream(Drawing):
    """The next number of a stream that the whole batch shares."""

    def parameters(self, sampling):
        return replace(sampling, seed=torch.randint(2**62, sampling.seed.shape))


@faults.plant("test_company_and_place_change_no_token", "row 1 alone|assert .* == ")
class DrawsByPlace(Drawing):
    """The row's number in the batch goes into its seed."""

    def parameters(self, sampling):
        return replace(sampling, seed=sampling.seed + torch.arange(len(sampling.seed)))


@faults.plant("test_draws_follow_the_distribution*", "over positions")
class ForgetsThePosition(Drawing):
    """Every token of a request gets the same random number."""

    def parameters(self, sampling):
        return replace(sampling, position=torch.zeros_like(sampling.position))


@faults.plant("test_seed_and_position_decide", "assert .* > 6")
class ForgetsTheSeed(Drawing):
    def parameters(self, sampling):
        return replace(sampling, seed=torch.zeros_like(sampling.seed))


@faults.plant("test_draws_follow_the_distribution[0.5]", "over seeds")
class ForgetsTheTemperature(Drawing):
    def parameters(self, sampling):
        return replace(sampling, temperature=(sampling.temperature > 0).float())


@faults.plant("test_top_k_of_none_some_and_more_than_there_are[0]", "assert 1 > 1")
class TopKOfZeroKeepsOne(Drawing):
    """A9: nanochat#466, lattice#225."""

    def parameters(self, sampling):
        return replace(sampling, top_k=sampling.top_k.clamp(min=1), truncated=True)


@faults.plant("test_top_k_of_none_some_and_more_than_there_are[5]", "assert False")
class TopKKeepsOneMore(Drawing):
    def parameters(self, sampling):
        return replace(sampling, top_k=sampling.top_k + (sampling.top_k > 1))


@faults.plant("test_top_k_of_none_some_and_more_than_there_are[10000]", "IndexError|RuntimeError")
class TopKBeyondTheVocabulary(Drawing):
    def logits(self, logits, sampling):
        for row, k in zip(logits, sampling.top_k.tolist(), strict=True):
            row.topk(max(k, 1))
        return logits


@faults.plant("test_top_p_keeps_the_least_that_reaches_the_mass", "top_p=0.6")
class TopPStopsShort(Drawing):
    """Drops the token at which the mass is reached."""

    def parameters(self, sampling):
        return replace(sampling, top_p=(sampling.top_p - 0.15).clamp(min=1e-3))


@faults.plant("test_top_p_keeps_the_least_that_reaches_the_mass", "top_p=0.4")
class TopPIsIgnored(Drawing):
    def parameters(self, sampling):
        return replace(sampling, truncated=False)


@faults.plant("test_logprobs_do_not_depend_on_how_many_are_asked_for*", "not close")
class LogprobsAmongThoseAskedFor(DefaultSampler):
    """Normalised over the tokens that are reported (A9: vllm#44319)."""

    def sample(self, logits, sampling):
        found = super().sample(logits, sampling)
        if found.logprobs is None:
            return found
        mass = found.top_logprobs.logsumexp(-1)
        return replace(found, logprobs=found.logprobs - mass, top_logprobs=found.top_logprobs - mass[:, None])


@faults.plant("test_logprobs_do_not_depend_on_how_many_are_asked_for*", "not close")
class LogprobsAtTheTemperature(DefaultSampler):
    def sample(self, logits, sampling):
        found = super().sample(logits, sampling)
        if found.logprobs is None:
            return found
        warm = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
        return draw.with_logprobs(found.tokens, logits / warm, sampling)


@faults.plant("test_tokens_that_are_ruled_out_are_never_drawn", "assert {0, 1, 2,.* == {")
class GivesEveryTokenAChance(Drawing):
    def logits(self, logits, sampling):
        return logits.clamp(min=-4.0)


@faults.plant("test_company_changes_no_bit*", "vocabulary of .*: logprobs have other bits")
class TakesOffASharedMaximum(Drawing):
    """Right, but the maximum of the whole batch rounds otherwise than the row's own."""

    def logits(self, logits, sampling):
        return logits - logits.max()


@faults.plant("test_company_changes_no_bit[3]", "vocabulary of 151936: logprobs have other bits")
class SumsInParts(DefaultSampler):
    """Sums the mass of the tail by `sum`, which threads share when there is one row."""

    def sample(self, logits, sampling):
        found = super().sample(logits, sampling)
        if found.logprobs is None:
            return found
        return replace(found, logprobs=found.logprobs - logits.float().softmax(-1).sum(-1).log())


@faults.plant("test_greedy_takes_the_first_of_the_largest*", "must be .4. int64")
class AnswersInInt32(DefaultSampler):
    def sample(self, logits, sampling):
        return Sampled(logits.argmax(-1).int())


@pytest.mark.parametrize("fault", faults, ids=str)
def test_is_found(fault):
    fault.must_be_found()
