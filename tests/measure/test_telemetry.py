"""What NVIDIA's driver tells of a GPU, from a driver of paper: no test here has a GPU."""

import sys
import threading
import types

import pytest
import torch

from nanofw.measure import telemetry
from nanofw.measure.telemetry import Telemetry, sampled

CUDA = torch.device("cuda", 0)


class NVMLError(Exception):
    pass


class Paper(types.ModuleType):
    """pynvml, as far as it is used: answers from `answers`, and an answer that is an error is raised."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40

    def __init__(self, **answers):
        super().__init__("pynvml")
        self.open, self.enough = 0, threading.Event()
        self.answers = {
            "DeviceGetName": b"Paper 4000",
            "SystemGetDriverVersion": "580.1",
            "DeviceGetPowerUsage": 250_000,
            "DeviceGetTemperature": 61,
            "DeviceGetMemoryInfo": types.SimpleNamespace(used=3 * 2**30),
            "DeviceGetCurrentClocksThrottleReasons": 1,
            "DeviceGetComputeRunningProcesses": ["this one"],
        } | answers

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1234"
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle, which):
        return {1: 1980, 2: 3201}[which]

    def __getattr__(self, name):
        if (question := name.removeprefix("nvml")) not in self.__dict__["answers"]:
            raise AttributeError(name)
        answer = self.__dict__["answers"][question]

        def ask(*args):
            if name == "nvmlDeviceGetComputeRunningProcesses":  # the last question of a sample
                self.enough.set()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask


@pytest.fixture
def on_paper(monkeypatch):
    """Sample a GPU of paper once or more; what was found."""

    def run(**answers):
        nvml = Paper(**answers)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="1234"))
        with sampled(CUDA, every_s=0.001) as found:
            assert nvml.enough.wait(20)
        assert nvml.open == 0
        assert "nanofw-telemetry" not in {thread.name for thread in threading.enumerate()}
        return found

    return run


def test_what_is_recorded(on_paper):
    record = on_paper().record()
    assert (record["name"], record["driver"]) == ("Paper 4000", "580.1")
    assert record["samples"] >= 1
    assert record["sm_mhz"] == {"min": 1980, "median": 1980, "max": 1980}
    assert record["memory_mhz"]["max"] == 3201
    assert record["power_w"]["max"] == 250
    assert record["temperature_c"]["max"] == 61
    assert record["used_gib"]["max"] == 3
    assert (record["throttled"], record["other_processes"]) == ({}, 0)


def test_an_idle_gpu_alone_is_no_news(on_paper):
    assert on_paper().notices() == []


def test_a_throttled_gpu_says_so(on_paper):
    found = on_paper(DeviceGetCurrentClocksThrottleReasons=4 | 0x40)
    assert found.notices() == [
        "Paper 4000 ran below its clocks in 100% of the run: power limit",
        "Paper 4000 ran below its clocks in 100% of the run: temperature (hardware)",
    ]
    assert set(found.record()["throttled"]) == {"power limit", "temperature (hardware)"}


def test_a_shared_gpu_says_so(on_paper):
    found = on_paper(DeviceGetComputeRunningProcesses=["this one", "another", "third"])
    assert found.notices() == ["Paper 4000 was shared: other processes on it: 2"]


def test_a_gpu_that_does_not_answer_everything(on_paper):
    record = on_paper(DeviceGetPowerUsage=NVMLError(), DeviceGetCurrentClocksThrottleReasons=NVMLError()).record()
    assert "power_w" not in record
    assert record["temperature_c"]["max"] == 61


def test_a_driver_that_does_not_know_the_gpu(on_paper, monkeypatch):
    monkeypatch.setattr(Paper, "nvmlDeviceGetHandleByUUID", lambda *_: (_ for _ in ()).throw(NVMLError()))
    nvml = Paper()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="1234"))
    with sampled(CUDA) as found:
        assert found is None
    assert nvml.open == 0


def test_nothing_to_tell_without_nvidia(monkeypatch):
    with sampled(torch.device("cpu")) as found:
        assert found is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with sampled(CUDA) as found:
        assert found is None


def test_reasons_are_named_as_the_driver_names_them():
    pynvml = pytest.importorskip("pynvml")
    for name in telemetry.SLOWED:
        assert hasattr(pynvml, f"nvmlClocksThrottleReason{name}")


def test_a_run_too_short_for_a_sample():
    assert Telemetry("x", "y").notices() == []
    assert Telemetry("x", "y").record()["samples"] == 0
