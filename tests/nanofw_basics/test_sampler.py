"""The default sampler passes the conformance suite (A9)."""

from nanofw.testing.sampler_suite import SamplerSuite
from nanofw_basics.sampler import DefaultSampler


class TestDefaultSampler(SamplerSuite):
    backend = DefaultSampler
