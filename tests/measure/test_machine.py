"""The description of the machine."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from nanofw.measure import machine

KEYS = {"cpu", "cores", "threads", "memory_gib", "system", "python", "nanofw", "torch", "transformers", "triton", "gpu"}


def test_description():
    found = machine.describe()
    assert set(found) == KEYS
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["threads"] == torch.get_num_threads()
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert json.loads(json.dumps(found)) == found
    line = machine.summary(found)
    assert "\n" not in line
    assert found["cpu"] in line


def test_memory_is_unknown_without_psutil(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert machine.describe()["memory_gib"] is None


def test_packages_that_are_not_installed_are_none(monkeypatch):
    def missing(name):
        raise machine.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "version", missing)
    found = machine.describe()
    assert (found["triton"], found["transformers"]) == (None, None)
    assert "triton none" in machine.summary(found)


def test_gpu(monkeypatch, tmp_path):
    properties = types.SimpleNamespace(name="Some GPU", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(machine, "_driver", lambda: "570.1")
    found = machine.describe()
    assert found["gpu"] == {
        "name": "Some GPU",
        "count": 2,
        "memory_gib": 80.0,
        "capability": "9.0",
        "cuda": torch.version.cuda,
        "driver": "570.1",
    }
    assert machine.summary(found).startswith("Some GPU, driver 570.1, ")


class Nvml:
    """The part of nvidia-ml-py that is asked, for one GPU that keeps its power to itself."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    shut_down = 0

    class NVMLError(Exception):
        """What every failing call raises."""

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.shut_down += 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1234":
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetMaxClockInfo(self, gpu, which):
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[which]

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        raise self.NVMLError


def test_limits_of_a_gpu(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert machine._limits("1234") == {"max_sm_mhz": 1980, "max_memory_mhz": 3201}
    assert machine._limits("5678") == {}
    assert nvml.shut_down == 2

    def fail():
        raise Nvml.NVMLError

    nvml.nvmlInit = fail
    assert machine._limits("1234") == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine._limits("1234") == {}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\n", "570.133.20"),
        ("something else\n", None),
        (None, None),
    ],
)
def test_driver(monkeypatch, tmp_path, text, version):
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(machine, "Path", lambda path: file)
    assert machine._driver() == version
