"""What observers are told, one typed event a hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanofw.engine import Engine
    from nanofw.request import RequestOutput


@dataclass(frozen=True, slots=True)
class EngineCreated:
    """An engine is ready: plugins resolved, weights loaded, cache allocated, runner warmed up.

    Attributes:
        engine: the engine.
    """

    engine: Engine


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step's tokens have arrived.

    Attributes:
        index: number of the step, from 0.
        num_requests, num_tokens: B and T of the step.
        num_generated: tokens that counted.
        num_preempted: requests put back when the step was planned.
        started, finished: `time.perf_counter()` in seconds, when it was planned and when its tokens were there.
    """

    index: int
    num_requests: int
    num_tokens: int
    num_generated: int
    num_preempted: int
    started: float
    finished: float


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request ended, whatever the reason.

    Attributes:
        output: the last one that its caller gets.
    """

    output: RequestOutput
