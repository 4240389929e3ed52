"""The one place from which our kernels are launched, so that launches can be counted with or without a GPU.

Triton's own launch hook is silent in its interpreter; this seam is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_counter: ContextVar[list[str] | None] = ContextVar("nanofw_launches", default=None)


def launch(
    kernel: Any, grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]], /, *args: Any, **meta: Any
) -> None:
    """`kernel[grid](*args, **meta)`, counted where somebody counts."""
    if (names := _counter.get()) is not None:
        names.append(str(getattr(kernel, "__name__", None) or getattr(kernel.fn, "__name__", "kernel")))
    kernel[grid](*args, **meta)


@contextmanager
def counting() -> Iterator[list[str]]:
    """Collect the names of the kernels launched inside, in order."""
    token = _counter.set([])
    try:
        yield _counter.get() or []
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
