"""Count what a call does: the same numbers on every machine, GPU or none, however busy it is.

Operations of torch are seen by a dispatch mode, reads of tensors by the host by what they go through, kernels of our
own by the launch seam, and Python functions by the interpreter's profile hook. A kernel that runs in Triton's
interpreter is one launch, as on a GPU: what the interpreter does for it is not counted.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanofw import launch
from nanofw.measure.steady import steady

if TYPE_CHECKING:
    from nanofw.engine import Engine

_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
_READS = ("_local_scalar_dense", "nonzero", "equal", "_unique2", "unique_dim", "unique_consecutive", "masked_select")
_READ_METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
"""Ways from a tensor to the host that no operation shows, where the tensor lies on the CPU already."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What one call did.

    Attributes:
        aten_calls: operations of torch, views included.
        bytes_written: by these operations; not by kernels of our own, whose writes nobody sees.
        host_reads: values of tensors that the host asked for. On a GPU each waits for all that was launched.
        launches: kernels of our own.
        python_calls: Python functions called.
    """

    aten_calls: int = 0
    bytes_written: int = 0
    host_reads: int = 0
    launches: int = 0
    python_calls: int = 0


def count(call: Callable[[], Any]) -> Counts:
    """Count what `call` does.

    Args:
        call: is called twice, since what counts operations would itself be counted as calls: once for them, once for
            the functions. Both should do the same work. Call it before, if the first time is not like the others.
    """
    with launch.counting() as launches, _Reads(launches) as reads, _Operations(launches) as operations:
        call()
    return Counts(
        operations.calls, operations.bytes_written, operations.reads + reads.reads, len(launches), _functions(call)
    )


def step_counts(engine: Engine, batch: int, context: int) -> Counts:
    """Counts of one steady decode step of a whole engine (see `count`: two steps are looked at).

    Args: as for `nanofw.measure.steady.steady`, and it raises what that raises.
    """
    with steady(engine, batch, context):
        return count(engine.step)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what reaches torch's dispatcher."""

    def __init__(self, launches: launch.Launches) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches, self.calls, self.bytes_written, self.reads = launches, 0, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with self:  # inference mode passes composite operations as they are; what they are made of is what is done
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        out = func(*args, **(kwargs or {}))
        if not self.launches.running:
            name = func.overloadpacket.__name__
            self.calls += 1
            self.bytes_written += _bytes_written(func, name, args, kwargs or {}, out)
            self.reads += name in _READS or _leaves_the_device(name, args, out)
        return out


class _Reads(TorchFunctionMode):
    """Counts the reads of tensors that no operation shows."""

    def __init__(self, launches: launch.Launches) -> None:
        super().__init__()
        self.launches, self.reads = launches, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READ_METHODS and not self.launches.running and args[0].device.type == "cpu":
            self.reads += 1
        return func(*args, **(kwargs or {}))


def _leaves_the_device(name: str, args: Sequence[Any], out: Any) -> bool:
    if name not in ("_to_copy", "copy_", "_copy_from"):
        return False
    source = args[1] if name == "copy_" else args[0]
    target = args[0] if name == "copy_" else out
    return bool(source.device.type != "cpu" and target.device.type == "cpu")


def _bytes_written(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes of new results and of what is changed in place; a view writes nothing."""
    if name in _EMPTY:
        return 0
    results = out if isinstance(out, (tuple, list)) else (out,)
    written = 0
    for result, returned in zip(_flat(results), func._schema.returns, strict=False):
        if returned.alias_info is None:
            written += _size(result)
        elif returned.alias_info.is_write:
            written += _places(name, args, result) * result.element_size()
    return written


def _places(name: str, args: Sequence[Any], target: torch.Tensor) -> int:
    """Elements of `target` that an operation in place writes."""
    if name == "index_put_":
        given = [index for index in args[1] if index is not None]
        if any(index.dtype == torch.bool for index in given):
            return target.numel()
        indexed = math.prod(target.shape[i] for i, index in enumerate(args[1]) if index is not None)
        places = torch.broadcast_tensors(*given)[0].numel()  # type: ignore[no-untyped-call]
        return int(places) * target.numel() // max(indexed, 1)
    if name in ("index_copy_", "index_add_"):
        return int(args[3].numel())
    if name in ("scatter_", "scatter_add_"):
        return int(args[2].numel())
    return target.numel()


def _flat(results: Sequence[Any]) -> list[Any]:
    return [part for result in results for part in (result if isinstance(result, (tuple, list)) else (result,))]


def _size(result: Any) -> int:
    return result.numel() * result.element_size() if isinstance(result, torch.Tensor) else 0


def _functions(call: Callable[[], Any]) -> int:
    """Python functions that `call` calls, itself included."""
    calls, collecting, before = 0, gc.isenabled(), sys.getprofile()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call" and not launches.running:
            calls += 1

    gc.disable()  # what the collector finalizes belongs to others
    with launch.counting() as launches:
        sys.setprofile(watch)
        try:
            call()
        finally:
            sys.setprofile(before)
            if collecting:
                gc.enable()
    return calls
