"""The CUDA-graph runner passes the conformance suite: with a graph on a GPU, over static buffers elsewhere."""

from typing import ClassVar

from nanofw.testing import RunnerSuite
from nanofw_cudagraph.runner import CudaGraphRunner


class TestCudaGraph(RunnerSuite):
    backend = CudaGraphRunner
    options: ClassVar = {"buckets": [1, 2, 4, 8], "contexts": [16]}
