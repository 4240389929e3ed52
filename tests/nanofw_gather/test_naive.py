"""The attention in Python loops passes the conformance suite."""

from nanofw.testing import AttentionSuite
from nanofw_gather.naive import NaiveGather


class TestNaiveGather(AttentionSuite):
    backend = NaiveGather
