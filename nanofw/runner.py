"""Contract of a runner: take a planned step to the device, run model and sampler, hand back a result to come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nanofw.component import Component

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from nanofw.attention import Attention
    from nanofw.batch import Step
    from nanofw.kv_cache import KVCache
    from nanofw.model import Model
    from nanofw.sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class HostSampled:
    """A step's tokens on the host: numpy arrays shaped like `Sampled`."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32] | None = None
    top_ids: npt.NDArray[np.int64] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None


class Pending(ABC):
    """A step that has been submitted and may still be running."""

    @abstractmethod
    def wait(self) -> HostSampled:
        """Wait for the step's tokens. Called once."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a runner runs, already built and validated. `rows` is the most requests in a step, `max_tokens` its T."""

    model: Model
    attention: Attention
    kv_cache: KVCache
    sampler: Sampler
    device: torch.device
    rows: int
    max_tokens: int


@dataclass(slots=True)
class RunnerReport:
    """What really ran, for `engine.resolved` and every record: the path, and steps that left it, by reason."""

    path: str
    steps: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


class Runner(Component):
    """Runs steps in the order they are submitted.

    It keeps the last token sampled for each row on the device, and feeds it to the rows that `step.feeds` marks.

    Attributes a subclass sets:
        report: the path it takes, and how often it had to leave it.
    """

    report: RunnerReport

    def __init__(self, parts: Parts, options: Any) -> None:
        self.parts, self.options = parts, options

    @classmethod
    def validate(cls, parts: Parts) -> list[str]:
        """Every reason why this runner cannot run `parts`; empty if it can."""
        return []

    def warm_up(self) -> None:
        """Do before the first step what should not be paid for by it: compile, capture."""

    @abstractmethod
    def submit(self, step: Step) -> Pending:
        """Start a step and return without waiting for it, where the device allows that."""
