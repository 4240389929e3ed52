"""The eager runner: upload the step, launch every operation of model and sampler, copy the tokens back."""

from __future__ import annotations

from typing import Any

import torch

from nanofw.batch import Step
from nanofw.runner import Parts, Pending, Runner, RunnerReport


class EagerRunner(Runner):
    """What a plain PyTorch program does. On a GPU the host launches ahead and waits only in `Pending.wait`."""

    def __init__(self, parts: Parts, options: Any) -> None:
        super().__init__(parts, options)
        self.report = RunnerReport(path="eager")
        self._last_token = torch.zeros(parts.rows, dtype=torch.int64, device=parts.device)

    def submit(self, step: Step) -> Pending:
        """Launch the step."""
        self.report.steps += 1
        return self.run_eagerly(step, self._last_token)
