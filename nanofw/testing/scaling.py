"""Judge scaling laws: decode throughput at one batch size against that at another, whatever the machine does meanwhile.

A machine that others use gets faster and slower by more than most laws allow. So every round visits all batch sizes, in
an order shuffled anew, and a ratio is only ever taken within a round. What is judged is the median of the ratios by its
confidence interval from order statistics, which assumes nothing about the noise (Conover, Practical Nonparametric
Statistics, 1999, section 3.2): an interval inside the law's bounds holds, one outside fails, one that straddles a bound
asks for more rounds. After the last look the median alone decides, and the verdict says so.

    for verdict in judge(MyAttention):
        print(verdict.text)
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanofw.component import Component
from nanofw.config import Config
from nanofw.laws import ScalingLaw
from nanofw.plugins import PluginHost, kind_of
from nanofw.testing.decode_rates import DecodeRates
from nanofw.testing.laws import COUNTED, Verdict, host_with

Measure = Callable[[int, int], float]
"""Decode throughput, in tokens a second, of (batch size, context) once."""

LOOKS = (8, 16, 32)
"""Rounds after which the intervals are looked at; each look takes twice the rounds of the one before."""

CONFIDENCE = 0.99
"""Of one interval. Over the three looks, at most 3 of 200 runs then call a law broken that just holds, or back."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a run of rounds found.

    Attributes:
        verdicts: one for each law, in their order.
        rates: tokens a second by (batch size, context), one value a round.
    """

    verdicts: list[Verdict]
    rates: Mapping[tuple[int, int], Sequence[float]]


def judge(component: type[Component], options: Mapping[str, Any] | None = None) -> list[Verdict]:
    """Measure a plugin in an engine of plain ones, with the model dummy:tiny, on a GPU where there is one.

    Args:
        component: its class. One that declares no scaling law has no verdicts.
        options: its options, as a user would set them.

    Raises:
        PluginError: it cannot run here, cannot work with the plain plugins, or its times would say nothing.
    """
    if not (laws := scaling_laws(component)):
        return []
    kind = kind_of(component)
    settings = {"model_impl" if kind == "model" else kind: COUNTED, "options": {kind: dict(options or {})}}
    return judge_engine(laws, Config.build({"model": "dummy:tiny"}, settings), host_with(kind, component)).verdicts


def judge_engine(laws: Sequence[ScalingLaw], config: Config, host: PluginHost, looks: Sequence[int] = LOOKS) -> Judged:
    """Judge laws by the engine that `config` describes. Raises PluginError; see `DecodeRates`."""
    return judge_rates(laws, DecodeRates(config, host, _points(laws)), looks)


def scaling_laws(component: type[Component]) -> list[ScalingLaw]:
    """Those laws of a plugin that are timed."""
    return [law for law in component.laws if isinstance(law, ScalingLaw)]


def judge_rates(laws: Sequence[ScalingLaw], measure: Measure, looks: Sequence[int] = LOOKS) -> Judged:
    """Measure until every law is decided, or the last look is over.

    Args:
        laws: at least one; those that share a batch size and context share its measurements.
        measure: is asked for each point once a round. What it needs to warm up is its own affair.
        looks: rounds after which to look, rising.
    """
    points, shuffle = _points(laws), random.Random(0).shuffle
    rates: dict[tuple[int, int], list[float]] = {point: [] for point in points}

    def gains(law: ScalingLaw) -> list[float]:
        start, end = (rates[batch, law.context] for batch in (law.start, law.end))
        return [after / before for before, after in zip(start, end, strict=True)]

    done = 0
    for look in looks:
        for _ in range(look - done):
            shuffle(points)
            for point in points:
                rates[point].append(measure(*point))
        done = look
        if not any(_straddles(law, gains(law)) for law in laws):
            break
    return Judged([_verdict(law, gains(law)) for law in laws], rates)


def _points(laws: Sequence[ScalingLaw]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((batch, law.context) for law in laws for batch in (law.start, law.end)))


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two of the values that have the median of their distribution between them, at least with that confidence.

    Infinite where there are too few values to say: 8 are needed for 99 %.
    """
    ordered, count = sorted(values), len(values)
    low, outside = -1, 0.0
    for rank in range(count // 2):
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - confidence:
            break
        low = rank
    return (ordered[low], ordered[count - 1 - low]) if low >= 0 else (-math.inf, math.inf)


def _straddles(law: ScalingLaw, gains: Sequence[float]) -> bool:
    (low, high), (least, most) = median_interval(gains), _bounds(law)
    return low < least <= high or low <= most < high


def _bounds(law: ScalingLaw) -> tuple[float, float]:
    least = -math.inf if law.at_least is None else law.at_least
    return least, math.inf if law.at_most is None else law.at_most


def _verdict(law: ScalingLaw, gains: Sequence[float]) -> Verdict:
    median, (low, high) = statistics.median(gains), median_interval(gains)
    least, most = _bounds(law)
    text = (
        f"declared: {law}; measured at context {law.context}: {median:.3g} times ({low:.3g} to {high:.3g} in "
        f"{len(gains)} rounds)"
    )
    if _straddles(law, gains):
        text += "; the interval straddles the bound, so the median alone decides"
    if median < least:
        text += (
            ". Something is done request by request: the count laws name what grows with B. Remove it, or declare "
            "what is true"
        )
    if median > most:
        text += ". It scales better than it promises: declare that"
    return Verdict(law, least <= median <= most, text)
