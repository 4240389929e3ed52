"""The attention by one gather passes the conformance suite."""

from nanofw.testing import AttentionSuite
from nanofw_gather.vectorized import VectorizedGather


class TestVectorizedGather(AttentionSuite):
    backend = VectorizedGather
