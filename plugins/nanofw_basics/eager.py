"""The eager runner: upload the step, launch every operation of model and sampler, copy the tokens back."""

from __future__ import annotations

from typing import Any

import torch

from nanofw.batch import Batch, Step
from nanofw.runner import HostSampled, Parts, Pending, Runner, RunnerReport
from nanofw.sampler import Sampled


class EagerRunner(Runner):
    """What a plain PyTorch program does. On a GPU the host launches ahead and waits only in `Pending.wait`."""

    def __init__(self, parts: Parts, options: Any) -> None:
        super().__init__(parts, options)
        self.report = RunnerReport(path="eager")
        self._last_token = torch.zeros(parts.rows, dtype=torch.int64, device=parts.device)

    @torch.inference_mode()
    def submit(self, step: Step) -> Pending:
        """Launch the step."""
        parts = self.parts
        batch = Batch.from_step(step, parts.device, self._last_token)
        batch = batch.with_plan(parts.attention.plan(batch))
        logits = parts.model.forward(batch, parts.attention, parts.kv_cache.layers)
        sampling = step.sampling.to(parts.device) if step.sampling is not None else None
        sampled = parts.sampler.sample(logits, sampling)
        rows = torch.from_numpy(step.rows).to(parts.device, non_blocking=True)
        self._last_token.index_copy_(0, rows, sampled.tokens)
        self.report.steps += 1
        return EagerPending(sampled)


class EagerPending(Pending):
    """Copies on their way to the host, and the event that says they have arrived."""

    def __init__(self, sampled: Sampled) -> None:
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
        return HostSampled(*(t.cpu().numpy() for t in self._host))


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
