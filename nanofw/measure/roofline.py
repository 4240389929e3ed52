"""How fast a decode step could be at best: by what it must read, by what it must compute, on this machine.

The roofline (Williams, Waterman, Patterson, CACM 2009): a step takes at least the bytes it must move over the
bandwidth, and at least the operations it must do over their rate. A decode step must read every weight
once, whatever the batch, and the keys and values of every context; that is why a batch is nearly free until the
contexts weigh as much as the weights. Activations are not counted: they fit a cache, and are small beside weights.

Bandwidth and rate are measured, once a machine, and kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from nanofw.cache_folder import cache_folder
from nanofw.measure.machine import describe
from nanofw.measure.rounds import interleaved
from nanofw.model import ModelSpec

ROUNDS = 7
READ_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""More than any cache holds."""
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}

FORMAT = 1
"""Of the file that keeps it."""


@dataclass(frozen=True, slots=True)
class Roof:
    """What a device does at best, with the threads that torch uses now.

    Attributes:
        read_bandwidth: bytes a second that a sum over a large tensor reads.
        flops: floating-point operations a second of a large matrix product in `dtype`.
    """

    device: str
    dtype: str
    read_bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Floor:
    """The least a decode step must do, and how long that takes.

    Attributes:
        bytes: weights once, the keys and values of all contexts, and those that the step adds.
        flops: a multiplication and an addition for each weight and request, and those of attention.
        ms: the longer of the two times. bound: which one that is.
    """

    bytes: int
    flops: int
    ms: float
    bound: Literal["memory", "compute"]


def floor(spec: ModelSpec, batch: int, context: int, roof: Roof) -> Floor:
    """Of one decode step.

    Args:
        spec: the model's.
        batch: requests. context: tokens each of them has, the new one included.
        roof: of the device.
    """
    size, moved, flops = spec.dtype.itemsize, spec.weight_bytes, 2 * batch * spec.weight_bytes // spec.dtype.itemsize
    for layer in spec.layers:
        seen = min(context, layer.window or context)
        moved += 2 * batch * (seen + 1) * layer.num_kv_heads * layer.head_size * size
        flops += 4 * batch * seen * layer.num_heads * layer.head_size
    by_memory, by_compute = moved / roof.read_bandwidth, flops / roof.flops
    return Floor(moved, flops, 1e3 * max(by_memory, by_compute), "memory" if by_memory >= by_compute else "compute")


def roof_of(device: torch.device, dtype: torch.dtype) -> Roof:
    """The roof of a device: as it was measured before on this machine, or measured now, and kept.

    It is kept in nanofw's cache folder (`NANOFW_CACHE`), a file for each machine, software, thread count and dtype.
    A folder that cannot be written to costs the measurement again, of about a second.
    """
    file = _file(device, dtype)
    if (kept := _read(file)) is not None:
        return kept
    roof = measured(device, dtype)
    _write(file, roof)
    return roof


def measured(device: torch.device, dtype: torch.dtype) -> Roof:
    """Measure it now: the best of several rounds, since whatever else runs can only slow it down."""
    values = torch.ones(READ_BYTES.get(device.type, 2**28) // 4, device=device)
    read = min(_seconds(values.sum, device))
    number = MATMUL_SIZE.get(device.type, 1024)
    left, right = (torch.ones(number, number, device=device, dtype=dtype) for _ in range(2))
    product = min(_seconds(lambda: left @ right, device))
    return Roof(
        str(device.type),
        str(dtype).removeprefix("torch."),
        values.numel() * values.element_size() / read,
        2 * number**3 / product,
    )


def _seconds(call: Callable[[], object], device: torch.device) -> list[float]:
    timed = interleaved({"it": call}, device, ROUNDS)["it"]
    return timed.device or timed.wall


def _file(device: torch.device, dtype: torch.dtype) -> Path:
    what = json.dumps([FORMAT, describe(), str(device), str(dtype)], sort_keys=True)
    return cache_folder() / "roofs" / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> Roof | None:
    try:
        return Roof(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):  # not there, or half written by something that is not us
        return None


def _write(file: Path, roof: Roof) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(handle, "w") as out:
            json.dump(asdict(roof), out)
        Path(name).replace(file)
    except OSError:
        return  # kept or not, it was measured
