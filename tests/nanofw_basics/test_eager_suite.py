"""The eager runner passes the conformance suite."""

from nanofw.testing import RunnerSuite
from nanofw_basics.eager import EagerRunner


class TestEager(RunnerSuite):
    backend = EagerRunner
    rows = 5
