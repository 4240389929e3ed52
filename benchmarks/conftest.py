"""Shared by the benchmarks: the gate, a smaller run, and the installed plugins. See docs/benchmarks.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nanofw.measure import gate
from nanofw.plugins import PluginHost


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="Fewer rounds and batch sizes; nothing is judged.")


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # what is measured here is too small to share out
    judge = gate.enable(config, Path(__file__).parent)
    if judge and config.getoption("quick", False):
        judge.reduced = "--quick"


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    """Whether to measure little."""
    return bool(request.config.getoption("quick", False))


@pytest.fixture(scope="session")
def host() -> PluginHost:
    """The installed plugins."""
    return PluginHost.load()
