"""Where the time of a decode step goes, and why: `nanofw explain`.

Three looks at the same steady steps, since each disturbs what the others measure: by the clock with nothing else on;
counted (`nanofw.measure.counters`); and traced by torch's profiler, from which only shares are taken.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanofw.measure import bottleneck
from nanofw.measure.counters import Counts, step_counts
from nanofw.measure.fit import Fit
from nanofw.measure.roofline import Roof, floor
from nanofw.measure.rounds import wait
from nanofw.measure.steady import steady

if TYPE_CHECKING:
    from nanofw.engine import Engine
    from nanofw.laws import Counter

FIT_BATCHES = (2, 3, 5)
"""Where counts are taken to see with what they grow. Many things are special at 1."""
FITTED: tuple[Counter, ...] = ("aten_calls", "python_calls", "bytes_written", "host_reads", "launches")

ROUNDS, LONGEST_S, MOST_STEPS = 5, 0.2, 32
"""A round of the clock: at most so many seconds and steps."""
SMALL = 16_000
"""Of the smallest operations, and of empty calls, that are timed at once: for longer than a time slice, too."""
MOST_TRACED = 30_000
"""Operations in a trace: each takes memory, and time to sort."""
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """One of the largest costs of a step.

    Attributes:
        name: an operation of torch, on a GPU also a kernel; or what is outside all of them.
        ms: a step. share: of the step. calls: a step.
    """

    name: str
    ms: float
    share: float
    calls: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A decode step of one combination of plugins at one batch size.

    Attributes:
        batch, context: requests, and tokens each of them has.
        wall_ms: of a step, the median over rounds.
        device_ms: time a GPU computes in a step; None on a CPU.
        host_share: of the step's time, what the host alone accounts for. On a GPU, the time in which it computes
            nothing. On a CPU, where the work is done by the thread that asks for it, the time that as many of the
            smallest operations and function calls would take.
        counts: of a step. growth: by counter, with what it grows, e.g. "aten_calls = 31 + 7 B ctx"; empty where the
            engine takes too few requests or tokens to look.
        bytes: that a step must move at least (`nanofw.measure.roofline`). bandwidth: of that, bytes a second.
            bandwidth_share: of the bandwidth that was measured on this machine.
        floor_ms: the roofline's time of a step. bound: by "memory" or "compute".
        costs: the largest, largest first. On a GPU kernels, if it is busy for most of the step.
        bottleneck: its kind. sentence: in words.
    """

    batch: int
    context: int
    wall_ms: float
    device_ms: float | None
    host_share: float
    counts: Counts
    growth: dict[str, str]
    bytes: int
    bandwidth: float
    bandwidth_share: float
    floor_ms: float
    bound: str
    costs: tuple[Cost, ...]
    bottleneck: str
    sentence: str


def explain(engine: Engine, batch: int, context: int, roof: Roof, fits: dict[Counter, Fit]) -> Breakdown:
    """Look at a steady decode step.

    Args:
        engine: idle, with room for some steps beyond `context`.
        batch: requests. context: tokens of each.
        roof: of its device. fits: `growth` of this engine.

    Raises:
        RequestError: such requests do not fit the engine.
    """
    spec = engine.runner.parts.model.spec
    rounds = [_clocked(engine, batch, context) for _ in range(ROUNDS)]
    wall_s = statistics.median(wall for wall, _, _ in rounds)
    counts = step_counts(engine, batch, context)
    device_s, costs = _traced(engine, batch, context, wall_s, counts.aten_calls)
    if device_s is not None:
        host_share = max(0.0, 1 - device_s / wall_s)
    else:
        # Taken within a round: what slowed its steps down slowed its smallest operations down as well.
        shares = ((counts.aten_calls * o + counts.python_calls * c) / wall for wall, o, c in rounds)
        host_share = min(1.0, statistics.median(shares))
    least = floor(spec, batch, context, roof)
    share = least.bytes / wall_s / roof.read_bandwidth
    kind, sentence = bottleneck.bottleneck(
        bottleneck.Evidence(
            wall_ms=1e3 * wall_s,
            host_share=host_share,
            counts=counts,
            fits=fits,
            floor=least,
            layers=len(spec.layers),
            bandwidth_share=share,
            largest=(costs[0].name, costs[0].share),
        )
    )
    return Breakdown(
        batch=batch,
        context=context,
        wall_ms=1e3 * wall_s,
        device_ms=None if device_s is None else 1e3 * device_s,
        host_share=host_share,
        counts=counts,
        growth={counter: str(fit).partition(" = ")[2] for counter, fit in fits.items()},
        bytes=least.bytes,
        bandwidth=least.bytes / wall_s,
        bandwidth_share=share,
        floor_ms=least.ms,
        bound=least.bound,
        costs=costs,
        bottleneck=kind,
        sentence=sentence,
    )


def growth(engine: Engine, context: int) -> dict[Counter, Fit]:
    """With what the counts of a step grow, by counter; empty where the engine is too small to see it.

    Args:
        engine: idle. context: tokens about which to look.
    """
    block = engine.kv_cache.block_size
    batches = [batch for batch in FIT_BATCHES if batch <= engine.table.rows]
    # In the middle of a block: at its end a cache has work for each request, once in so many steps.
    last = (min(context, engine.max_model_len - 4) - block // 2) // block
    contexts = [blocks * block + block // 2 for blocks in sorted({max(last // 2, 1), last})]
    if len(batches) < 2 or len(contexts) < 2 or last < 2:
        return {}
    grid = {(b, c): step_counts(engine, b, c) for b, c in itertools.product(batches, contexts)}
    return {counter: Fit.of(counter, grid) for counter in FITTED}


def overheads(device: torch.device) -> tuple[float, float]:
    """Seconds of the host for one of the smallest operations (a view or a sum of one element), and an empty call."""
    value = torch.zeros(1, device=device)
    with torch.inference_mode():
        wait(device)
        start = time.perf_counter()
        for _ in range(SMALL // 2):
            value.view(1)
            value.add_(1)
        wait(device)
        between = time.perf_counter()
        for _ in range(SMALL):
            _empty()
        return (between - start) / SMALL, (time.perf_counter() - between) / SMALL


def _empty() -> None:
    return


def _clocked(engine: Engine, batch: int, context: int) -> tuple[float, float, float]:
    """Seconds of a step, of several at about the same context; and, right after them, `overheads`."""
    device = engine.runner.parts.model.spec.device
    with steady(engine, batch, context):
        room = _room(engine, context)
        wait(device)
        start, steps = time.perf_counter(), 0
        while steps < room and time.perf_counter() - start < LONGEST_S:
            engine.step()
            steps += 1
        wait(device)
        return (time.perf_counter() - start) / steps, *overheads(device)


def _room(engine: Engine, context: int) -> int:
    """Steps until a request would end, and no more than change the context by little."""
    return max(1, min(MOST_STEPS, engine.max_model_len - context - 2, context // 4))


def _traced(
    engine: Engine, batch: int, context: int, wall_s: float, operations: int
) -> tuple[float | None, tuple[Cost, ...]]:
    """Seconds that a GPU is busy in a step (None on a CPU), and the largest costs.

    A trace slows the host. So shares of host time are those of the traced steps, and milliseconds are shares of the
    step's time by the clock; kernels on a GPU take as long as ever.
    """
    from torch.profiler import ProfilerActivity, profile

    device = engine.runner.parts.model.spec.device
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with steady(engine, batch, context):
        steps = max(1, min(_room(engine, context), MOST_TRACED // max(operations, 1)))
        wait(device)
        with profile(activities=kinds) as trace:
            start = time.perf_counter()
            for _ in range(steps):
                engine.step()
            wait(device)
            traced_s = time.perf_counter() - start
    events: list[Any] = list(trace.key_averages())
    kernels = [(e.key, e.self_device_time_total / 1e6, e.count) for e in events if e.device_type.name != "CPU"]
    ours = [e for e in events if e.device_type.name == "CPU" and e.self_cpu_time_total > 0]
    host = [(e.key.removeprefix("aten::"), e.self_cpu_time_total / 1e6, e.count) for e in ours]
    busy = sum(seconds for _, seconds, _ in kernels) / steps if device.type == "cuda" else None
    if busy is not None and busy >= wall_s / 2:
        found, whole, scale = kernels, wall_s * steps, 1.0
    else:
        outside = max(0.0, traced_s - sum(seconds for _, seconds, _ in host))
        found, whole, scale = [*host, ("outside torch (Python)", outside, steps)], traced_s, wall_s * steps / traced_s
    largest = sorted(found, key=lambda cost: -cost[1])[:SHOWN]
    costs = tuple(Cost(n, 1e3 * s * scale / steps, s / whole, calls / steps) for n, s, calls in largest if s > 0)
    return None if busy is None else min(busy, wall_s), costs
