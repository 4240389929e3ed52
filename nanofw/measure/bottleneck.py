"""What holds a decode step back, in one sentence, from what was counted and measured. No plugin is known by name.

The order is that of the cure: what the host does one by one, then what it waits for, then what memory is moved for
nothing, then what the host does whatever the batch; and when none of these decides, how near the step is to its floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nanofw.laws import Counter
from nanofw.measure.counters import Counts
from nanofw.measure.fit import Fit
from nanofw.measure.roofline import Floor

Kind = Literal["loop", "waits", "copies", "calls", "memory", "compute", "work"]

DECIDES = 0.5
"""Share of a step from which something is said to decide it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a judgement rests on.

    Attributes:
        wall_ms: of a step. host_share: of it, what the host alone accounts for.
        counts: of a step. fits: with what they grow; empty where it could not be looked at.
        floor: the least a step could take. layers: of the model.
        bandwidth_share: the floor's bytes over the step's time, as a share of what the memory gives.
        largest: name and share of the largest cost.
    """

    wall_ms: float
    host_share: float
    counts: Counts
    fits: Mapping[Counter, Fit]
    floor: Floor
    layers: int
    bandwidth_share: float
    largest: tuple[str, float]


def bottleneck(seen: Evidence) -> tuple[Kind, str]:
    """The kind of bottleneck, and a sentence with its numbers and its cure."""
    loop = _loop(seen)
    if loop and seen.host_share >= DECIDES:
        return "loop", loop
    if seen.counts.host_reads > seen.layers and seen.host_share >= DECIDES:
        return "waits", (
            f"The host asks for {seen.counts.host_reads:,} values of tensors a step, and waits each time for all that "
            "was started before: keep them on the device until the tokens of the step."
        )
    nearest = seen.floor.ms / seen.wall_ms
    if nearest >= DECIDES and seen.floor.bound == "memory":
        return "memory", (
            f"A step moves {amount(seen.floor.bytes)} at {seen.bandwidth_share:.0%} of the bandwidth that this memory "
            "has: what is left to gain lies in fewer bytes, or more requests to each pass over the weights."
        )
    if nearest >= DECIDES:
        return "compute", (
            f"A step computes at {nearest:.0%} of the rate of a large matrix product: what is left to gain lies in a "
            "narrower dtype or in less to compute."
        )
    written = seen.fits.get("bytes_written")
    if written and written.grows_with("B*ctx") and seen.counts.bytes_written > seen.floor.bytes:
        return "copies", (
            f"A step writes {amount(seen.counts.bytes_written)}, {seen.counts.bytes_written / seen.floor.bytes:.1f} "
            f"times all it must read, {amount(written.per_token)} for each token of each context: copies of keys and "
            f"values. {seen.bandwidth_share:.1%} of the memory's bandwidth is used for what must be read; an attention "
            "that reads the cache in place makes no copy."
        )
    if seen.host_share >= DECIDES:
        return "calls", (
            f"A step makes {seen.counts.aten_calls:,} calls to torch whatever the batch, and the host needs "
            f"{seen.host_share:.0%} of the step for them, so more requests are nearly free. To make one request "
            "faster takes fewer calls: fused kernels, or a captured graph."
        )
    name, share = seen.largest
    return "work", (
        f"The largest cost is {name} with {share:.0%} of the step, which takes {1 / nearest:,.1f} times its floor of "
        f"{seen.floor.ms:.3g} ms ({seen.floor.bound})."
    )


def _loop(seen: Evidence) -> str | None:
    """What is said where calls grow with requests, or with their tokens."""
    for counter, what in (("aten_calls", "calls to torch"), ("python_calls", "calls of Python functions")):
        fit = seen.fits.get(counter)  # type: ignore[call-overload]
        if fit is None:
            continue
        number = getattr(seen.counts, counter)
        if fit.grows_with("B*ctx"):
            each, small = f"{fit.per_token:.3g} for each token of each context", "B*ctx small copies"
        elif fit.grows_with("B"):
            each, small = f"{fit.per_request:.3g} for each request", "small pieces, request after request"
        else:
            continue
        return (
            f"A step makes {number:,} {what}, {each} ({fit}): {small}, for which the host needs "
            f"{seen.host_share:.0%} of the step. {seen.bandwidth_share:.1%} of the memory's bandwidth is used. Decode "
            "cannot scale until one call serves the whole batch."
        )
    return None


def amount(size: float) -> str:
    """Bytes as people say them."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= step:
            return f"{size / step:.3g} {unit}"
    return f"{size:.0f} B"
