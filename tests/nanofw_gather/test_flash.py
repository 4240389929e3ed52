"""The attention by one gather and torch's fused kernel passes the conformance suite."""

from nanofw.testing import AttentionSuite
from nanofw_gather.flash import FlashGather


class TestFlashGather(AttentionSuite):
    backend = FlashGather
