"""What a GPU was doing during a run: clocks, power, temperature, memory, what held it back, and who else used it.

Read through nvidia-ml-py (`pip install 'nanofw[gpu]'`) from a thread, five times a second. Without NVIDIA's driver or
the package there is nothing to tell, and nothing else changes.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

EVERY_S = 0.2

SLOWED = {
    "SwPowerCap": "power limit",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "temperature",
    "HwThermalSlowdown": "temperature (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
}
"""Reasons of NVML for lower clocks that make a measurement slower than it should be; an idle GPU is none of them."""


@dataclass(slots=True)
class Telemetry:
    """Samples of one run. Each list is as long as the GPU answered the question: not every GPU answers all.

    Attributes:
        name, driver: of the GPU.
        sm_mhz, memory_mhz, power_w, temperature_c, used_gib: one value a sample.
        throttled: by reason, in how many samples. samples: how many there are.
        others: processes beside this one on the GPU, at most at a time.
    """

    name: str = ""
    driver: str = ""
    samples: int = 0
    sm_mhz: list[float] = field(default_factory=list)
    memory_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)
    temperature_c: list[float] = field(default_factory=list)
    used_gib: list[float] = field(default_factory=list)
    throttled: dict[str, int] = field(default_factory=dict)
    others: int = 0

    def record(self) -> dict[str, Any]:
        """Plain values for a JSON record: lowest, median and highest of what was sampled."""
        series = ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "used_gib")
        spread = {
            name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
            for name in series
            if (values := getattr(self, name))
        }
        told = {"name": self.name, "driver": self.driver, "samples": self.samples}
        return told | spread | {"throttled": dict(self.throttled), "other_processes": self.others}

    def notices(self) -> list[str]:
        """Sentences about what makes the run's figures doubtful; none if all is well."""
        found = [
            f"{self.name} ran below its clocks in {number / self.samples:.0%} of the run: {reason}"
            for reason, number in self.throttled.items()
        ]
        if self.others:
            found.append(f"{self.name} was shared: other processes on it: {self.others}")
        return found


@contextmanager
def sampled(device: torch.device, every_s: float = EVERY_S) -> Iterator[Telemetry | None]:
    """Sample `device` until the block ends; None where there is no NVIDIA GPU or no nvidia-ml-py."""
    gpu = _Gpu.open(device)
    if gpu is None:
        yield None
        return
    telemetry, stop = Telemetry(gpu.name, gpu.driver), threading.Event()

    def watch() -> None:
        gpu.sample(telemetry)
        while not stop.wait(every_s):
            gpu.sample(telemetry)

    thread = threading.Thread(target=watch, name="nanofw-telemetry", daemon=True)
    thread.start()
    try:
        yield telemetry
    finally:
        stop.set()
        thread.join()
        gpu.close()


class _Gpu:
    """One GPU as NVML knows it: found by its UUID, since CUDA_VISIBLE_DEVICES renumbers what torch sees."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle
        self.name, self.driver = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlSystemGetDriverVersion())

    @classmethod
    def open(cls, device: torch.device) -> _Gpu | None:
        if device.type != "cuda" or not torch.cuda.is_available():
            return None
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        try:
            uuid = torch.cuda.get_device_properties(device).uuid
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            return None

    def close(self) -> None:
        self.nvml.nvmlShutdown()

    def sample(self, into: Telemetry) -> None:
        nvml, gpu = self.nvml, self.handle
        into.samples += 1
        with suppress(nvml.NVMLError):
            into.sm_mhz.append(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
        with suppress(nvml.NVMLError):
            into.memory_mhz.append(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM))
        with suppress(nvml.NVMLError):
            into.power_w.append(nvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
        with suppress(nvml.NVMLError):
            into.temperature_c.append(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        with suppress(nvml.NVMLError):
            into.used_gib.append(nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30)
        with suppress(nvml.NVMLError):
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
            for name, words in SLOWED.items():
                if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0):
                    into.throttled[words] = into.throttled.get(words, 0) + 1
        with suppress(nvml.NVMLError):
            # One is this process, under a number that a container need not know.
            into.others = max(into.others, len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) - 1)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
