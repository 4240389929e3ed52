"""Shared by the benchmarks. They measure and report; they do not judge, and are no part of the tests."""

from __future__ import annotations

import pytest

from nanofw.plugins import PluginHost


@pytest.fixture(scope="session")
def host() -> PluginHost:
    """The installed plugins."""
    return PluginHost.load()
