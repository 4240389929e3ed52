"""With what a count of a decode step grows: fitted to `a + b B + c B ctx`, B requests of ctx tokens each.

A count that rises once on the way (a merge kernel from some context on, a table sorted from some batch on) is no
growth: what is done for each request, or for each of its tokens, adds at least one a request over the whole grid, and
half of that is where a slope counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nanofw.laws import Counter, Term
from nanofw.measure.counters import Counts

Grid = Mapping[tuple[int, int], Counts]
"""Counts by (B, ctx)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """`constant + per_request * B + per_token * B * ctx`, by least squares."""

    counter: Counter
    constant: float
    per_request: float
    per_token: float
    contexts: tuple[int, ...]

    @classmethod
    def of(cls, counter: Counter, grid: Grid) -> Fit:
        """From at least three points that are not on one line."""
        points = np.array([(1, batch, batch * context) for batch, context in grid], dtype=float)
        counts = np.array([getattr(found, counter) for found in grid.values()], dtype=float)
        constant, per_request, per_token = np.linalg.lstsq(points, counts, rcond=None)[0].tolist()
        return cls(counter, constant, per_request, per_token, tuple(sorted({context for _, context in grid})))

    def grows_with(self, term: Term) -> bool:
        """Whether the slope is that of something done for each request, or for each token of each (or some of them)."""
        if term == "B":
            return abs(self.per_request) >= 0.5
        return abs(self.per_token) * (self.contexts[-1] - self.contexts[0]) >= 0.5

    def __str__(self) -> str:
        terms = [_number(self.constant)] if abs(self.constant) >= 0.05 else []
        for slope, name in ((self.per_request, "B"), (self.per_token, "B ctx")):
            if self.grows_with("B" if name == "B" else "B*ctx"):
                terms.append(f"{_number(slope)} {name}")
        return f"{self.counter} = {' + '.join(terms) or 0}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
