"""What a plugin promises about its cost: declared on its class, judged by `nanofw.testing.laws`.

A count law needs no clock and never flakes: it says with what the counts of one decode step grow. A scaling law is
timed: it says how throughput rises with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Counter = Literal["aten_calls", "bytes_written", "host_reads", "launches", "python_calls"]
COUNTERS: tuple[Counter, ...] = get_args(Counter)

Term = Literal["B", "B*ctx"]
TERMS: tuple[Term, ...] = get_args(Term)


@dataclass(frozen=True, slots=True)
class CountLaw:
    """With what a count of one decode step grows, at B requests whose contexts have ctx tokens each.

    It is exact: a term that is declared must be there, and one that is not must not.

    Attributes:
        counter: "aten_calls", operations of torch; "bytes_written", by them; "host_reads", values of the device that
            the host waits for; "launches", kernels of our own; "python_calls", functions called.
        grows_with: "B", "B*ctx", both or none.
    """

    counter: Counter
    grows_with: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        """Raises: ValueError for a counter or a term that there is not."""
        if self.counter not in COUNTERS:
            raise ValueError(f"counter must be one of {', '.join(COUNTERS)}, got {self.counter!r}")
        if unknown := set(self.grows_with) - set(TERMS):
            raise ValueError(f"grows_with takes {' and '.join(TERMS)}, got {', '.join(map(repr, sorted(unknown)))}")

    def __str__(self) -> str:
        return f"{self.counter} O({' + '.join(self.grows_with) or 1})"


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """How decode throughput rises with the batch: tokens a second at `end` requests over those at `start`.

    Attributes:
        start, end: requests.
        context: tokens each of them has.
        at_least, at_most: bounds of the ratio; None where there is none.
    """

    start: int = 1
    end: int = 16
    at_least: float | None = None
    at_most: float | None = None
    context: int = 64

    def __post_init__(self) -> None:
        """Raises: ValueError for a law that says nothing, or what cannot be."""
        if not 1 <= self.start < self.end:
            raise ValueError(f"a law goes from one batch size up to another, got {self.start} to {self.end}")
        if self.context < 1:
            raise ValueError(f"context must be at least 1 token, got {self.context}")
        if self.at_least is None and self.at_most is None:
            raise ValueError("a scaling law needs at_least or at_most")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least ({self.at_least:g}) exceeds at_most ({self.at_most:g})")

    def __str__(self) -> str:
        low = [] if self.at_least is None else [f"at least {self.at_least:g}"]
        high = [] if self.at_most is None else [f"at most {self.at_most:g}"]
        return f"decode throughput rises {' and '.join(low + high)} times from batch {self.start} to {self.end}"


Law = CountLaw | ScalingLaw

FLAT: tuple[Law, ...] = (
    CountLaw("aten_calls"),
    CountLaw("launches"),
    CountLaw("host_reads"),
    CountLaw("python_calls"),
    ScalingLaw(at_least=4.0),
)
"""What every plugin promises that declares nothing else. A larger batch or context takes no more work of the host, and
so decode throughput rises with the batch."""
