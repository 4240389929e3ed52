"""The one place from which our kernels are launched, so that launches can be counted with or without a GPU.

Triton's own launch hook is silent in its interpreter; this seam is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Launches(list[str]):
    """Names of kernels, in the order of their launches.

    Attributes:
        running: a kernel is being launched. In Triton's interpreter that is where it runs, and what it does there is
            none of the host's work.
    """

    running = False


_counter: ContextVar[Launches | None] = ContextVar("nanofw_launches", default=None)


def launch(
    kernel: Any, grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]], /, *args: Any, **meta: Any
) -> None:
    """`kernel[grid](*args, **meta)`, counted where somebody counts."""
    if (launches := _counter.get()) is None:
        kernel[grid](*args, **meta)
        return
    launches.append(str(getattr(kernel, "__name__", None) or getattr(kernel.fn, "__name__", "kernel")))
    launches.running = True
    try:
        kernel[grid](*args, **meta)
    finally:
        launches.running = False


@contextmanager
def counting() -> Iterator[Launches]:
    """Collect the names of the kernels launched inside, in order."""
    launches = Launches()
    token = _counter.set(launches)
    try:
        yield launches
    finally:
        _counter.reset(token)


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter (decided when triton was imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def no_triton() -> str | None:
    """Why Triton kernels cannot run on this machine, or None: what a plugin made of them answers as `unavailable`."""
    import torch

    if torch.cuda.is_available() or interpreted():
        return None
    return "needs an NVIDIA GPU, or Triton's interpreter for tests (TRITON_INTERPRET=1 before starting)"


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; without bound in the interpreter."""
    import torch

    if device.type != "cuda":
        return 1 << 62
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
