"""Buckets, padding and static buffers, on a CPU without a graph: every batch size gives the eager tokens."""

import pytest

pytest.importorskip("triton")

from nanofw import PluginHost, SamplingParams

GRAPH = {"attention": "triton-paged", "runner": "cuda-graph"}


@pytest.fixture(scope="module")
def host():
    return PluginHost.load(only=("basics", "gather", "triton", "cudagraph"))


def tokens(llm, count, params):
    prompts = [[(7 * i + j) % 250 for j in range(1 + i % 5)] for i in range(count)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(("depth", "temperature"), [(0, 0.0), (1, 0.0), (1, 0.9)])
def test_every_batch_size_to_one_beyond_the_largest_bucket(llm, host, depth, temperature):
    params = SamplingParams(max_tokens=3, temperature=temperature, ignore_eos=True, seed=3)
    graphs = {"runner": {"buckets": [1, 2, 4], "contexts": [16]}}
    eager = llm("dummy:tiny", host=host)
    static = llm("dummy:tiny", host=host, steps_in_flight=depth, **GRAPH, options=graphs)
    for count in range(1, 6):
        assert tokens(static, count, params) == tokens(eager, count, params), f"{count} requests"
    fallbacks = static.engine.runner.report.fallbacks
    assert list(fallbacks) == ["more than 4 requests, the largest bucket"]
    assert sum(fallbacks.values()) > 0


def test_padding_rows_touch_no_slot(llm, host):
    graphs = {"runner": {"buckets": [4], "contexts": [16]}}
    static = llm("dummy:tiny", host=host, **GRAPH, options=graphs, kv_blocks=16)
    cache = static.engine.kv_cache.layers[0]
    cache.key.fill_(7.0)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    static.generate([[1, 2], [3, 4], [5, 6]], params)
    written = (cache.key != 7.0).flatten(2).any(-1)
    assert written.sum() == 3 * (2 + 3)  # prompt and all but the last token of each request
    assert not written[0].any()
