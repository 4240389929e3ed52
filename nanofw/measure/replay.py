"""Samples that were measured elsewhere, handed to pytest-benchmark as if it had measured them.

pytest-benchmark runs one benchmark to its end, then the next: a machine that drifts meanwhile makes one look slower.
Here all variants are measured in turns (`nanofw.measure.sweep`, `nanofw.measure.rounds`), and each test then replays
its own samples, so that tables, `--benchmark-compare`, `--benchmark-json` and `pytest-benchmark compare` work as ever.

    pytest_plugins = ["nanofw.measure.replay"]   # in the top-level conftest.py; `nanofw.measure.gate` brings it along

    def test_decode(replay, samples):
        replay(samples, tok_s=1234.5)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest


class Clock:
    """A timer that stands still until it is told the time."""

    __name__ = "replay"  # how pytest-benchmark's records name it

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time it was told, in seconds."""
        return self.now

    def tell(self, seconds: float) -> None:
        """Set the time."""
        self.now = seconds


class Replay:
    """Hands samples to a `benchmark` fixture whose timer is `clock`.

    Attributes:
        benchmark: that fixture, for its `extra_info` and `group`.
    """

    def __init__(self, benchmark: Any, clock: Clock) -> None:
        self.benchmark, self._clock = benchmark, clock

    def __call__(self, samples: Sequence[float], **extra_info: Any) -> None:
        """Replay.

        Args:
            samples: seconds, one a round, in the order of the rounds. They arrive bit for bit.
            extra_info: what else the record shall hold.

        Raises:
            ValueError: there are no samples, or one is no time.
            RuntimeError: the `benchmark` fixture runs on another timer.
        """
        if not samples or not all(math.isfinite(s) and s > 0 for s in samples):
            raise ValueError(f"samples must be times in seconds, finite and above 0, got {list(samples)}")
        self.benchmark.extra_info.update(extra_info)
        rounds = iter(samples)

        def begin() -> tuple[tuple[float], dict[str, Any]]:
            self._clock.tell(0.0)  # counting from zero, the difference is the sample and not a rounded one
            return (next(rounds, samples[-1]),), {}

        self.benchmark.pedantic(self._clock.tell, setup=begin, rounds=len(samples))
        if self.benchmark.stats is not None and self.benchmark.stats.stats.data != list(samples):
            raise RuntimeError(
                "the benchmark fixture was made before `replay` could set its timer: ask for `replay` alone, it brings "
                "the fixture as `replay.benchmark`"
            )


@pytest.fixture
def replay_clock(request: pytest.FixtureRequest) -> Clock:
    """A clock of this test's own, set as its benchmark's timer beside what its marker says."""
    clock, given = Clock(), request.node.get_closest_marker("benchmark")
    options = {**(given.kwargs if given else {}), "timer": clock}
    request.node.add_marker(pytest.mark.benchmark(**options), append=False)
    return clock


@pytest.fixture
def replay(replay_clock: Clock, benchmark: Any) -> Replay:
    """Call it with measured samples, in seconds."""
    return Replay(benchmark, replay_clock)
