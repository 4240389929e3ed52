"""Contract of a runner: take a planned step to the device, run model and sampler, hand back a result to come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from nanofw.batch import Batch
from nanofw.component import Component
from nanofw.errors import EngineError
from nanofw.request import Logprob
from nanofw.sampler import Sampled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from nanofw.attention import Attention
    from nanofw.batch import Scoring, Step
    from nanofw.kv_cache import KVCache
    from nanofw.model import Model
    from nanofw.sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class HostSampled:
    """A step's tokens on the host: numpy arrays shaped like `Sampled`.

    Attributes:
        tokens, logprobs, top_ids, top_logprobs: as in `Sampled`.
        scores: the same of the prompt tokens that `step.scoring` names, where it does.
    """

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32] | None = None
    top_ids: npt.NDArray[np.int64] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None
    scores: HostSampled | None = None

    def logprob(self, index: int, wanted: int) -> Logprob:
        """The log-probabilities of row `index`, with the `wanted` likeliest tokens."""
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            raise EngineError("the sampler returned no logprobs although a request asked for them")
        top = zip(self.top_ids[index, :wanted].tolist(), self.top_logprobs[index, :wanted].tolist(), strict=True)
        return Logprob(int(self.tokens[index]), float(self.logprobs[index]), tuple(top))


class Pending(ABC):
    """A step that has been submitted and may still be running."""

    @abstractmethod
    def wait(self) -> HostSampled:
        """Wait for the step's tokens. Called once."""


class OnDevice(Pending):
    """Results that lie on a device. On a GPU their copies to pinned memory are under way, behind an event.

    Args:
        sampled: the step's tokens; not kept beyond the copy on a GPU.
        scores: the same of prompt tokens.
    """

    def __init__(self, sampled: Sampled, scores: Sampled | None = None) -> None:
        self._scores = OnDevice(scores) if scores is not None else None
        fields = [sampled.tokens]
        if sampled.logprobs is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
            fields += [sampled.logprobs, sampled.top_ids, sampled.top_logprobs]
        self._event: torch.cuda.Event | None = None
        self._host = fields
        if sampled.tokens.device.type == "cuda":
            self._host = [_to_pinned(t) for t in fields]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> HostSampled:
        """Wait for the event, on a GPU."""
        if self._event is not None:
            self._event.synchronize()
        arrays: list[Any] = [t.cpu().numpy() for t in self._host]
        host = HostSampled(*arrays)
        return host if self._scores is None else replace(host, scores=self._scores.wait())


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a runner runs, already built and validated.

    Attributes:
        model, attention, kv_cache, sampler: the parts that a step goes through.
        device: where they are.
        rows: most requests in a step.
        max_tokens: most tokens in a step, T.
    """

    model: Model
    attention: Attention
    kv_cache: KVCache
    sampler: Sampler
    device: torch.device
    rows: int
    max_tokens: int


@dataclass(slots=True)
class RunnerReport:
    """What really ran, for `engine.resolved` and every record.

    Attributes:
        path: what the runner does with a step as a rule, in a word.
        steps: how many it has run, those that left the path included.
        fallbacks: steps that left the path, counted by reason.
    """

    path: str
    steps: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


class Runner(Component):
    """Runs steps in the order they are submitted.

    It keeps the last token sampled for each row on the device, and feeds it to the rows that `step.feeds` marks.

    Attributes a subclass sets:
        report: the path it takes, and how often it had to leave it.
        buckets: batch sizes that its fast path is made for, in rising order, if it has any. A step takes the smallest
            that holds it, padded; one above the largest runs eagerly, counted in `report.fallbacks`.

    Args:
        parts: what it runs; `validate` has found no reason against them.
        options: an instance of its `Options`.
    """

    report: RunnerReport
    buckets: Sequence[int] = ()

    def __init__(self, parts: Parts, options: Any) -> None:
        self.parts, self.options = parts, options

    @classmethod
    def validate(cls, parts: Parts) -> list[str]:
        """Every reason why this runner cannot run `parts`; empty if it can."""
        return []

    @torch.inference_mode()
    def run_eagerly(self, step: Step, last_token: torch.Tensor) -> Pending:
        """Launch every operation of a step: what any runner may do with a step that its fast path does not take.

        Args:
            step: the plan.
            last_token: `[rows]` int64 on the device; read for `step.feeds`, then updated.
        """
        parts = self.parts
        batch = Batch.from_step(step, parts.device, last_token)
        batch = batch.with_plan(parts.attention.plan(batch))
        if step.scoring is not None:
            at = torch.from_numpy(step.scoring.at).to(parts.device, non_blocking=True)
            batch = replace(batch, logits_indices=torch.cat((batch.logits_indices, at)))
        logits = parts.model.forward(batch, parts.attention, parts.kv_cache.layers)
        logits, prompt_logits = logits.split_with_sizes((step.num_requests, logits.shape[0] - step.num_requests))
        sampling = step.sampling.to(parts.device) if step.sampling is not None else None
        sampled = parts.sampler.sample(logits, sampling)
        rows = torch.from_numpy(step.rows).to(parts.device, non_blocking=True)
        last_token.index_copy_(0, rows, sampled.tokens)
        return OnDevice(sampled, score(prompt_logits, step.scoring) if step.scoring is not None else None)

    def warm_up(self) -> None:
        """Do before the first step what should not be paid for by it: compile, capture."""

    @abstractmethod
    def submit(self, step: Step) -> Pending:
        """Start a step and return without waiting for it, where the device allows that.

        Args:
            step: the plan; its arrays are not written to.

        Returns:
            The result to come, waited for in the order of the steps.
        """


def score(logits: torch.Tensor, scoring: Scoring) -> Sampled:
    """Log-probabilities of the tokens that are there. Args: logits `[P, V]`, any floating type."""
    logprobs = logits.float().log_softmax(dim=-1)
    targets = torch.from_numpy(scoring.targets).to(logits.device, non_blocking=True)
    top = logprobs.topk(min(scoring.top, logits.shape[-1]), dim=-1)
    return Sampled(targets, logprobs.gather(-1, targets[:, None])[:, 0], top.indices, top.values)
