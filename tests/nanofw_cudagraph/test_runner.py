"""The CUDA-graph runner passes the suite: with a graph on a GPU, over its static buffers elsewhere."""

import functools
from typing import ClassVar

import pytest
import torch

from nanofw import PluginHost, SamplingParams
from nanofw.testing import RunnerSuite
from nanofw.testing.runner_matches import Matches
from nanofw.weights import resolve
from nanofw_basics.transformers_model import TransformersModel
from nanofw_cudagraph.runner import CudaGraphRunner


class TestCudaGraph(RunnerSuite):
    backend = CudaGraphRunner
    options: ClassVar = {"buckets": [1, 2, 4, 8], "contexts": [16]}


@functools.cache
def tiny(device):
    return TransformersModel(resolve("dummy:tiny"), torch.float32, device, TransformersModel.Options())


class TestWithTransformers(Matches):
    """A real model, in float32, in the same places."""

    backend = CudaGraphRunner
    options: ClassVar = {"buckets": [1, 2, 4], "contexts": [16]}
    rows = 5

    def make_model(self, device):
        return tiny(device)


@pytest.mark.parametrize(("rows", "expected"), [(3, [1, 2, 3]), (4, [1, 2, 4]), (9, [1, 2, 4, 8])])
def test_no_bucket_twice(rows, expected):
    """Each is captured once, and none is larger than a step can be."""
    suite = type("Suite", (TestCudaGraph,), {"rows": rows})
    assert list(suite().drive().runner.buckets) == expected


@pytest.mark.parametrize("count", [3, 5])
def test_with_paged_attention_in_an_engine(llm, count):
    """A padded batch and one above the largest bucket, a step in flight: the eager tokens."""
    pytest.importorskip("triton")
    host = PluginHost.load(only=("basics", "gather", "triton", "cudagraph"))
    params = SamplingParams(max_tokens=3, temperature=0.9, ignore_eos=True, seed=3)
    prompts = [[(7 * i + j) % 250 for j in range(1 + i % 5)] for i in range(count)]
    graphs = {"attention": "triton-paged", "runner": "cuda-graph", "steps_in_flight": 1}
    static = llm("dummy:tiny", host=host, **graphs, options={"runner": {"buckets": [1, 2, 4], "contexts": [16]}})
    found, expected = (
        [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
        for engine in (static, llm("dummy:tiny", host=host))
    )
    assert found == expected
    fallbacks = static.engine.runner.report.fallbacks
    assert list(fallbacks) == (["more than 4 requests, the largest bucket"] if count > 4 else [])
