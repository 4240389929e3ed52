"""The machine and the software that a measurement depends on."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """The machine as plain values for a JSON record.

    Returns:
        `cpu` (name), `cores` (that this process may use), `threads` (that torch uses), `memory_gib` (None without
        psutil), `system`; `python`, `nanofw`, `torch`, `transformers`, `triton` (versions, None if not installed);
        `gpu` None, or a table of `name`, `count`, `memory_gib`, `capability`, `cuda`, `driver`, and with nvidia-ml-py
        the highest clocks `max_sm_mhz` and `max_memory_mhz`, and `power_limit_w`. Nothing in it changes between runs.
    """
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "nanofw": _version("nanofw"),
        "torch": str(torch.__version__),
        "transformers": _version("transformers"),
        "triton": _version("triton"),
        "gpu": _gpu(),
    }


def summary(machine: dict[str, Any]) -> str:
    """One line of it, for a report."""
    gpu = machine["gpu"]
    where = f"{gpu['name']}, driver {gpu['driver']}, " if gpu else ""
    return (
        f"{where}{machine['cpu']} ({machine['cores']} cores, {machine['threads']} threads), python {machine['python']},"
        f" torch {machine['torch']}, transformers {machine['transformers']}, triton {machine['triton'] or 'none'}"
    )


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        import psutil
    except ImportError:
        return None
    return float(round(psutil.virtual_memory().total / 2**30, 1))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
    } | _limits(getattr(properties, "uuid", None))


def _limits(uuid: Any) -> dict[str, float]:
    """Clocks and power that the GPU may reach; empty where nvidia-ml-py is missing or does not know it."""
    try:
        import pynvml
    except ImportError:
        return {}
    found: dict[str, float] = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        with suppress(pynvml.NVMLError):  # not every GPU answers every question
            found["max_sm_mhz"] = pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)
            found["max_memory_mhz"] = pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_MEM)
        with suppress(pynvml.NVMLError):
            found["power_limit_w"] = pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()
    return found


def _driver() -> str | None:
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[1] if found else None
