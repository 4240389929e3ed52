"""Programmatic dependent launch (PDL), Hopper and newer: a kernel starts while its predecessor still runs.

An agreement between the kernels of all plugins in a step. A kernel that is launched with `**launch_options(True)` may
load straight away what no kernel of the step writes (weights, lengths, what earlier steps stored), and must call `wait`
before it touches anything else. Every such kernel waits, so order is transitive. Where `PDL` is false, on older GPUs
and in Triton's interpreter, both calls vanish.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start loading."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until all earlier kernels have finished and their results are visible."""
    if PDL:
        gdc_wait()


def available(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(pdl: bool) -> dict[str, Any]:
    """What to pass to a launch besides the kernel's own arguments."""
    return {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})
