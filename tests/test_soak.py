"""A short soak of every combination of scheduler, cache, depth and runner; the long one is benchmarks/test_soak.py."""

import pytest

import nanofw
from nanofw import PluginHost
from nanofw.testing.audited import audited_engine
from nanofw.testing.plain_attention import PlainAttention
from nanofw.testing.soak import Soak


class Plugin:
    """An attention that can be captured, and needs no GPU."""

    nanofw_api = nanofw.API

    @staticmethod
    @nanofw.hookimpl
    def nanofw_register_attention(register):
        register("plain", PlainAttention)


@pytest.mark.parametrize("runner", ["eager", "cuda-graph"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kv_cache", ["paged", "prefix"])
@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_soak(scheduler, kv_cache, depth, runner):
    """On a CPU the graphs are static buffers, filled and run again."""
    host = PluginHost.load(only=("basics", "gather", "cudagraph"))
    host.register(Plugin, "plain")
    engine = audited_engine(
        host,
        (2, 17),
        attention="plain",
        runner=runner,
        scheduler=scheduler,
        kv_cache=kv_cache,
        steps_in_flight=depth,
        kv_blocks=24,
        max_num_seqs=8,
        max_batch_tokens=48,
        options={
            "kv_cache": {"block_size": 4},
            "runner": {"buckets": [1, 3], "contexts": [16]} if runner == "cuda-graph" else {},
        },
    )
    soak = Soak(engine)
    soak.run(1000)
    assert soak.counts["failed"] > 2
    assert (soak.counts["found in the cache"] > 30) == (kv_cache == "prefix")
    assert soak.counts["aborted"] > 20
    assert set(soak.ledger.ended) == {"stop", "length", "abort"}
    if scheduler == "continuous":
        assert soak.counts["put back"] > 30
    if runner == "cuda-graph":
        assert engine.runner.report.fallbacks, (
            "more requests than the largest bucket holds were meant to decode at once"
        )
