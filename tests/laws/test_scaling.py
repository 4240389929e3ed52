"""Judging of scaling laws, on rates that are made up: what is true is then known, and so is the noise.

The rates of real engines are measured on a clock that their steps move.
"""

import itertools
import math
import random
import statistics

import pytest
import torch

from nanofw.attention import Capabilities
from nanofw.component import Component
from nanofw.config import Config
from nanofw.errors import PluginError
from nanofw.launch import launch
from nanofw.laws import FLAT, CountLaw, ScalingLaw
from nanofw.testing.decode_rates import DecodeRates
from nanofw.testing.scaling import LOOKS, judge, judge_rates, median_interval, scaling_laws
from nanofw_gather.naive import NaiveGather
from nanofw_gather.vectorized import VectorizedGather

RISES = ScalingLaw(1, 16, at_least=4.0)


def machine(gain, noise=0.05, seed=0):
    """Rates of something whose throughput really rises `gain` times from batch 1 to 16, evenly on a log scale."""
    draw = random.Random(seed)
    return lambda batch, context: 100 * gain ** (math.log2(batch) / 4) * draw.lognormvariate(0, noise)


def judged(law, measure):
    (verdict,) = (found := judge_rates([law], measure)).verdicts
    return verdict, len(found.rates[law.end, law.context])


@pytest.mark.parametrize(
    ("law", "gain", "holds"),
    [
        (RISES, 8.0, True),
        (RISES, 1.4, False),
        (ScalingLaw(1, 16, at_most=2.0), 1.4, True),
        (ScalingLaw(1, 16, at_most=2.0), 8.0, False),
        (ScalingLaw(1, 16, at_least=1.0, at_most=2.0), 1.4, True),
        (ScalingLaw(1, 16, at_least=1.0, at_most=2.0), 0.5, False),
        (ScalingLaw(1, 16, at_least=1.0, at_most=2.0), 3.0, False),
        (ScalingLaw(2, 8, at_least=1.9), 4.0, True),
        (ScalingLaw(2, 8, at_least=2.1), 4.0, False),
    ],
)
def test_what_is_clear_is_decided_at_the_first_look(law, gain, holds):
    verdict, rounds = judged(law, machine(gain, noise=0.01))
    assert (verdict.holds, rounds) == (holds, LOOKS[0])


def test_a_law_on_the_edge_asks_for_more_rounds_until_the_median_decides():
    counts, holding = [], 0
    for seed in range(40):
        verdict, rounds = judged(RISES, machine(4.0, noise=0.1, seed=seed))
        counts.append(rounds)
        holding += verdict.holds
        assert ("the median alone decides" in verdict.text) or rounds < LOOKS[-1] or not verdict.holds
    assert statistics.median(counts) == LOOKS[-1]
    assert 8 <= holding <= 32, "a coin would decide as often for as against it"


def test_a_close_law_is_decided_by_more_rounds():
    verdict, rounds = judged(RISES, machine(4.4, noise=0.1, seed=3))
    assert verdict.holds
    assert LOOKS[0] < rounds


@pytest.mark.parametrize(("gain", "holds"), [(8.0, True), (2.0, False)])
def test_noise_as_on_a_machine_that_others_use_misleads_in_no_run(gain, holds):
    """One sample in five takes 1 to 5 times as long, all others spread by 15 %."""

    def busy(seed):
        quiet, draw = machine(gain, noise=0.15, seed=seed), random.Random(-seed)
        return lambda batch, context: quiet(batch, context) / (draw.uniform(1, 5) if draw.random() < 0.2 else 1)

    assert {judged(RISES, busy(seed))[0].holds for seed in range(300)} == {holds}


def test_a_machine_that_slows_down_for_good_misleads_nobody():
    """Ten times slower by the end: batch after batch, the first would seem to be the fast one."""
    calls = itertools.count()
    steady = machine(8.0, noise=0.01)
    verdict, rounds = judged(RISES, lambda batch, context: steady(batch, context) / (1 + next(calls)))
    assert verdict.holds
    assert rounds <= LOOKS[1]


def test_each_round_visits_every_point_once_in_an_order_of_its_own():
    laws = [RISES, ScalingLaw(1, 4, at_least=100.0), ScalingLaw(1, 16, at_least=4.0, context=512)]
    seen = []

    def measure(batch, context):
        seen.append((batch, context))
        return float(batch)

    found = judge_rates(laws, measure)
    points = {(1, 64), (4, 64), (16, 64), (1, 512), (16, 512)}
    rounds = [tuple(seen[i : i + len(points)]) for i in range(0, len(seen), len(points))]
    assert len(rounds) == LOOKS[0]
    assert all(set(visited) == points for visited in rounds)
    assert len(set(rounds)) > LOOKS[0] // 2
    assert found.rates.keys() == points
    assert [verdict.law for verdict in found.verdicts] == laws
    assert [verdict.holds for verdict in found.verdicts] == [True, False, True]


def test_a_law_that_fails_says_what_was_found_and_what_to_do():
    verdict, _ = judged(RISES, lambda batch, context: 100.0 * batch**0.125)
    assert verdict.text == (
        "declared: decode throughput rises at least 4 times from batch 1 to 16; measured at context 64: 1.41 times "
        "(1.41 to 1.41 in 8 rounds). Something is done request by request: the count laws name what grows with B. "
        "Remove it, or declare what is true"
    )
    verdict, _ = judged(ScalingLaw(1, 16, at_most=2.0), lambda batch, context: 100.0 * batch)
    assert verdict.text.endswith("16 times (16 to 16 in 8 rounds). It scales better than it promises: declare that")


@pytest.mark.parametrize(("count", "low", "high"), [(8, 0, 7), (16, 2, 13), (32, 8, 23)])
def test_interval_of_a_median(count, low, high):
    """Ranks as tables of the sign test give them at 99 %."""
    values = random.Random(count).sample(range(count), count)
    assert median_interval(values, 0.99) == (low, high)


def test_interval_of_a_median_holds_it_as_often_as_it_says():
    draw = random.Random(0)
    runs, count = 4000, 16
    inside = 0
    for _ in range(runs):
        low, high = median_interval([draw.expovariate(1.0) for _ in range(count)], 0.95)
        inside += low <= math.log(2) <= high
    assert 0.95 <= inside / runs < 0.99


def test_too_few_values_for_an_interval():
    assert median_interval([1.0] * 7, 0.99) == (-math.inf, math.inf)
    assert median_interval([1.0], 0.5) == (-math.inf, math.inf)


# Engines


def test_rates_of_an_engine(clock, host):
    """A step of 4 requests takes 1.04 s, one of a single request 1.01 s; prefill does not count."""
    config = Config.build({"model": "dummy:tiny", "device": "cpu"})
    rates = DecodeRates(config, host, [(1, 20), (4, 20), (1, 40)])
    for _ in range(2):
        assert (rates(1, 20), rates(1, 40), rates(4, 20)) == pytest.approx((1 / 1.01, 1 / 1.01, 4 / 1.04))


def test_a_plugin_is_judged_in_an_engine_of_its_own(clock):
    class Promising(VectorizedGather):
        laws = (CountLaw("launches"), ScalingLaw(1, 4, at_least=3.88), ScalingLaw(1, 4, at_least=3.89))

    assert [verdict.holds for verdict in judge(Promising)] == [True, False]


def test_a_plugin_that_declares_nothing_promises_to_scale():
    assert scaling_laws(Component) == [ScalingLaw(1, 16, at_least=4.0)]
    assert Component.laws == FLAT


def test_a_plugin_that_promises_nothing_is_not_measured():
    class Silent(VectorizedGather):
        laws = ()

    assert judge(Silent) == []


def test_a_plugin_that_cannot_serve_says_so():
    class Picky(VectorizedGather):
        laws = (ScalingLaw(at_least=2.0),)
        capabilities = Capabilities(head_sizes=(7,))

    with pytest.raises(PluginError, match=r"head size 32 \(it takes 7\)"):
        judge(Picky)


def test_times_of_the_interpreter_are_refused(monkeypatch, host):
    class Launching(NaiveGather):
        laws = (ScalingLaw(at_least=2.0, context=4),)

        def attend(self, q, kv, batch):
            launch(Nothing(), (1,), q)
            return super().attend(q, kv, batch)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(PluginError, match=r"Triton's interpreter here \(nothing\)"):
        judge(Launching)


class Nothing:
    """A kernel as the launch seam sees one."""

    __name__ = "nothing"

    def __getitem__(self, grid):
        return lambda *args, **meta: None


def test_threads_are_as_before(host):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        DecodeRates(Config.build({"model": "dummy:tiny", "device": "cpu"}), host, [(1, 4)])(1, 4)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
