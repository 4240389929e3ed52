"""Shared by the benchmarks: the gate, a smaller run, and the installed plugins. See docs/how-to/benchmarks.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nanofw.build import resolve_device
from nanofw.measure import gate
from nanofw.measure.rounds import interleaved
from nanofw.plugins import PluginHost


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="Fewer rounds and batch sizes; nothing is judged.")


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # what is measured here is too small to share out
    judge = gate.enable(config, Path(__file__).parent)
    if judge and config.getoption("quick", False):
        judge.reduced = "--quick"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The soak takes half an hour, so it runs only where it is named: `pytest benchmarks/test_soak.py`."""
    named = any("test_soak" in argument for argument in config.args)
    for item in items:
        if item.path.name == "test_soak.py" and not named:
            item.add_marker(pytest.mark.skip(reason="takes half an hour: pytest benchmarks/test_soak.py"))


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    """Whether to measure little."""
    return bool(request.config.getoption("quick", False))


@pytest.fixture(scope="session")
def host() -> PluginHost:
    """The installed plugins."""
    return PluginHost.load()


@pytest.fixture(scope="session")
def read_bandwidth(quick: bool) -> float:
    """Bytes a second that this machine reads at best: a sum over more than its caches hold."""
    device = resolve_device("auto")
    values = torch.ones((2**30 if device.type == "cuda" else 2**26) // 4, device=device)
    timed = interleaved({"read": values.sum}, device, rounds=3 if quick else 7)["read"]
    return values.numel() * values.element_size() / min(timed.device or timed.wall)
