"""My own runner.

Begin at `submit`: it launches every operation of every step anew. A runner that captures a step once (a CUDA graph,
`torch.compile`) and replays it with other numbers saves that; what it cannot replay it may still run eagerly, if its
report says how often and why.
"""

from __future__ import annotations

from typing import Any

import torch

import nanofw
from nanofw import Parts, Pending, Runner, RunnerReport, Step

nanofw_api = (1, 0)


class MyRunner(Runner):
    """Plain: upload the step, run model and sampler, copy the tokens back."""

    def __init__(self, parts: Parts, options: Any) -> None:
        super().__init__(parts, options)
        self.report = RunnerReport(path="eager")
        # The token sampled last for each row stays on the device: the next step may read it before the host knows it.
        self._last_token = torch.zeros(parts.rows, dtype=torch.int64, device=parts.device)

    def submit(self, step: Step) -> Pending:
        """Start a step; whoever wants its tokens calls `wait()` on what comes back."""
        self.report.steps += 1
        return self.run_eagerly(step, self._last_token)


@nanofw.hookimpl
def nanofw_register_runner(register: Any) -> None:
    """Tell nanofw the name."""
    register("my-runner", MyRunner)
