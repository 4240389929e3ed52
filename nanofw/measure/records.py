"""From the runs of a sweep to the records that are kept and compared.

A measured value is kept as its median and all its rounds, `{"median": 1.5, "rounds": [1.4, 1.5, 1.9]}`, in the order of
the rounds. A speed-up is a ratio taken within each round, then the median: what disturbed a round disturbed both.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanofw.config import Config
    from nanofw.engine import Engine
    from nanofw.measure.explain import Breakdown
    from nanofw.measure.roofline import Roof
    from nanofw.measure.sweep import Run
    from nanofw.measure.telemetry import Telemetry

FORMAT = 2
"""Version of the JSON report. A reader that knows another must say so and not guess."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One value of each round, and their median."""

    median: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Measured:
        """From one value a round."""
        return cls(statistics.median(rounds), tuple(rounds))


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of plugins at one batch size.

    Attributes:
        prompt_tokens, tokens: prompt and generated tokens, all requests together. cached_tokens: prompt tokens that
            the KV cache held already, in the last round. preemptions: requests put back, in the last round.
        total_s: seconds for all of it. tok_s: generated tokens a second, prefill included.
        speedup: `tok_s` over that of the smallest batch size.
        decode_tok_s, decode_ms: tokens a second and milliseconds a step once every request has its first token.
        prefill_tok_s: prompt tokens a second until then.
    """

    model: str
    model_impl: str
    attention: str
    kv_cache: str
    scheduler: str
    runner: str
    sampler: str
    batch: int
    prompt_tokens: int
    tokens: int
    cached_tokens: int
    preemptions: int
    total_s: Measured
    tok_s: Measured
    speedup: Measured
    decode_tok_s: Measured
    decode_ms: Measured
    prefill_tok_s: Measured

    @classmethod
    def read(cls, record: dict[str, Any]) -> Point:
        """From its form in a JSON record."""
        measured = {name: value for name, value in record.items() if isinstance(value, Mapping)}
        return cls(**record | {name: Measured(v["median"], tuple(v["rounds"])) for name, v in measured.items()})


@dataclass(frozen=True, slots=True)
class Looked:
    """What is beside the measurement itself, and takes time of its own.

    Attributes:
        roof: what the machine does at best.
        roofline: by batch size, decode tokens a second that it allows: `{"batch": 4, "tok_s": 9000.0}`.
        explained: by label, `nanofw.measure.explain.Breakdown` at each batch size.
        laws: by plugin, its verdicts: `{"law": ..., "holds": true, "found": ...}`.
    """

    roof: Roof | None = None
    roofline: Sequence[Mapping[str, float]] = ()
    explained: Mapping[str, Sequence[Breakdown]] = field(default_factory=dict)
    laws: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def points(config: Config, by_batch: Mapping[int, Sequence[Run]]) -> list[Point]:
    """The records of one combination, smallest batch first.

    Args:
        config: what it ran with.
        by_batch: its runs by batch size, one a round.
    """
    base = by_batch[min(by_batch)]
    found = []
    for batch, runs in sorted(by_batch.items()):
        found.append(
            Point(
                model=config.model,
                model_impl=config.model_impl,
                attention=config.attention,
                kv_cache=config.kv_cache,
                scheduler=config.scheduler,
                runner=config.runner,
                sampler=config.sampler,
                batch=batch,
                prompt_tokens=runs[-1].prompt_tokens,
                tokens=runs[-1].tokens,
                cached_tokens=runs[-1].cached_tokens,
                preemptions=runs[-1].preemptions,
                total_s=Measured.of([r.total_s for r in runs]),
                tok_s=Measured.of([r.tok_s for r in runs]),
                speedup=Measured.of([r.tok_s / b.tok_s for r, b in zip(runs, base, strict=True)]),
                decode_tok_s=Measured.of([r.decode_tok_s for r in runs]),
                decode_ms=Measured.of([r.decode_ms for r in runs]),
                prefill_tok_s=Measured.of([r.prefill_tok_s for r in runs]),
            )
        )
    return found


def ran(engine: Engine) -> dict[str, Any]:
    """What really ran: plugins with distribution, version and path; steps that left the fast path; notes."""
    return {
        "resolved": {kind: asdict(r) for kind, r in engine.resolved.items()},
        "fallbacks": dict(engine.runner.report.fallbacks),
        "notes": list(engine.notes),
    }


def report(
    machine: dict[str, Any],
    settings: dict[str, Any],
    combinations: Mapping[str, Any],
    found: Sequence[Point],
    telemetry: Telemetry | None = None,
    looked: Looked | None = None,
    waited: float | None = None,
) -> dict[str, Any]:
    """The whole JSON report.

    Args:
        machine: `nanofw.measure.machine.describe()`.
        settings: of the sweep (rounds, seed, ...).
        combinations: by label, what `ran` there.
        found: all points.
        telemetry: of the GPU during the run; None without one.
        looked: what a closer look at the engines found, if there was one.
        waited: share of the measuring in which other programs had the processor (`nanofw.measure.contention`).
    """
    return {
        "format": FORMAT,
        "machine": machine,
        "telemetry": telemetry.record() if telemetry else None,
        "waited": waited,
        "settings": settings,
        "combinations": dict(combinations),
        "points": [asdict(p) for p in found],
        **asdict(looked or Looked()),
    }
