"""Canaries around every buffer that code allocates through torch, to catch writes past either end."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS: tuple[str, ...] = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "zeros",
    "zeros_like",
)
_ALLOCATIONS += ("new_zeros", "full", "full_like", "new_full", "ones", "ones_like", "new_ones")
_WIDTH = 256
_CANARY = 113


class Guarded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, buffers made by `torch.empty` and its kin lie between canaries.

    A kernel whose head size is padded to the next power of two and that forgets a mask writes past its output; torch
    itself would never notice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: list[tuple[str, torch.Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _ALLOCATIONS or not isinstance(out, torch.Tensor) or not out.numel():
            return out
        span = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))
        buffer = torch.full((span + 2 * _WIDTH,), _CANARY, device=out.device).to(out.dtype)
        guarded = buffer.as_strided(out.shape, out.stride(), _WIDTH)
        guarded.copy_(out)
        self._buffers.append((f"{name}{tuple(out.shape)}", buffer, span))
        return guarded

    def check(self) -> None:
        """Raises AssertionError that names the buffer whose canaries were overwritten."""
        for name, buffer, span in self._buffers:
            before, after = buffer[:_WIDTH], buffer[_WIDTH + span :]
            canary = torch.full_like(before, _CANARY)
            for where, canaries in (("before", before), ("after", after)):
                if not torch.equal(canaries, canary):
                    raise AssertionError(f"values {where} the buffer {name} were overwritten")
