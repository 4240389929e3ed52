"""What a benchmark asks to be judged by, beside its time: ratios, exponents and counts, which hold on any machine.

A figure lies in the record's `extra_info` under its own name, where people look for it; `extra_info["judged"]` says by
which rule, `extra_info["best"]` what the best round gave. A limit can be set for one benchmark:
`@pytest.mark.gate(time=0.5, speedup=0.3, steps=None)`; None means that the figure is recorded and not judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nanofw.errors import ConfigError
from nanofw.options import listing, suggest

RuleName = Literal["gain", "cost", "exponent", "count"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a figure is compared with the baseline's.

    Attributes:
        limit: how much worse it may be, unless the benchmark says otherwise.
        worse: of (baseline, now), by how much it is worse; negative where it is better.
        relative: that measure is a share of the baseline, not a difference.
        best: of several rounds.
    """

    limit: float
    worse: Callable[[float, float], float]
    relative: bool
    best: Callable[[Iterable[float]], float] = min

    def show(self, amount: float) -> str:
        """The measure in words."""
        return f"{amount:.0%}" if self.relative and math.isfinite(amount) else f"{amount:.3g}"


def _more(before: float, now: float) -> float:
    if before:
        return now / before - 1
    return math.inf if now > 0 else 0.0


RULES: dict[str, Rule] = {
    "gain": Rule(0.15, lambda before, now: 1 - now / before if before else 0.0, relative=True, best=max),
    "cost": Rule(0.15, _more, relative=True),
    "exponent": Rule(0.15, lambda before, now: now - before, relative=False),
    "count": Rule(0.0, lambda before, now: now - before, relative=False),
}
"""gain: a ratio of which more is better (a speed-up). cost: one of which less is better (a share). exponent: of growth,
less is better. count: of events, none more."""

TIME = Rule(0.2, _more, relative=True)


def judged(benchmark: Any, rule: RuleName, **figures: float | Sequence[float]) -> None:
    """Record figures of a benchmark that the gate compares with the baseline, on any machine.

    Args:
        benchmark: the fixture (`replay.benchmark` where the test replays).
        rule: how to compare them.
        figures: by name; a value, or one a round, of which the median is recorded.

    Raises:
        ConfigError: there is no such rule, or a figure is not a finite number.
    """
    if rule not in RULES:
        raise ConfigError(f"no rule {rule!r}{suggest(rule, RULES)}; rules are {listing(RULES)}")
    for name, given in figures.items():
        rounds = [given] if isinstance(given, (int, float)) else list(given)
        if not rounds or not all(map(math.isfinite, rounds)):
            raise ConfigError(f"figure {name} of {benchmark.fullname} must be finite, got {given}")
        info = benchmark.extra_info
        info[name] = statistics.median(rounds)
        info.setdefault("judged", {})[name] = rule
        info.setdefault("best", {})[name] = RULES[rule].best(rounds)
