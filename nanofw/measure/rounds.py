"""Time small pieces of work against each other: in turns, by the wall clock and by the GPU's own events."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)

LEAST_S = 2e-2
"""A sample lasts at least this long: several time slices, so that losing one of them does not decide a ratio."""


@dataclass(slots=True)
class Timed:
    """Seconds of one call, one value a round.

    Attributes:
        wall: from the call to its end, the device waited for.
        device: between two events on the GPU's stream; empty without a GPU.
        calls: made in each sample, which is divided by them.
    """

    calls: int
    wall: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    @property
    def device_s(self) -> float | None:
        """The median by the GPU's events, or None without a GPU."""
        return statistics.median(self.device) if self.device else None


def interleaved(
    work: Mapping[Name, Callable[[], object]],
    device: torch.device,
    rounds: int = 7,
    seed: int = 0,
    least_s: float = LEAST_S,
) -> dict[Name, Timed]:
    """Time each piece of work once a round, in an order that is shuffled anew.

    Args:
        work: calls by name. Each is called twice first: a kernel is compiled and tuned by its first call.
        device: where they run; a GPU is waited for and also timed by its events.
        rounds: samples of each.
        seed: of the order.
        least_s: seconds that a sample lasts at least, by repeating the call.
    """
    timed = {name: Timed(_calls(call, device, least_s)) for name, call in work.items()}
    shuffle = random.Random(seed).shuffle
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            order = list(work)
            shuffle(order)
            for name in order:
                _sample(work[name], timed[name], device)
    finally:
        if enabled:
            gc.enable()
    return timed


def wait(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _calls(call: Callable[[], object], device: torch.device, least_s: float) -> int:
    call()
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return max(1, math.ceil(least_s / (time.perf_counter() - start)))


def _sample(call: Callable[[], object], timed: Timed, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    wait(device)
    begin, end = (_event(), _event()) if on_gpu else (None, None)
    start = time.perf_counter()
    if begin is not None:
        begin.record()
    for _ in range(timed.calls):
        call()
    if end is not None:
        end.record()
    wait(device)
    timed.wall.append((time.perf_counter() - start) / timed.calls)
    if begin is not None and end is not None:
        timed.device.append(begin.elapsed_time(end) / 1e3 / timed.calls)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
