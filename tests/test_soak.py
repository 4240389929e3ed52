"""A short soak of every combination of scheduler, cache and depth; the long one is in benchmarks/test_soak.py."""

import pytest

from nanofw import PluginHost
from nanofw.testing.audited import audited_engine
from nanofw.testing.soak import Soak


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kv_cache", ["paged", "prefix"])
@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_soak(scheduler, kv_cache, depth):
    host = PluginHost.load(only=("basics", "gather"))
    engine = audited_engine(
        host,
        (2, 17),
        scheduler=scheduler,
        kv_cache=kv_cache,
        steps_in_flight=depth,
        kv_blocks=24,
        max_num_seqs=8,
        max_batch_tokens=48,
        options={"kv_cache": {"block_size": 4}},
    )
    soak = Soak(engine)
    soak.run(1000)
    assert soak.counts["failed"] > 2
    assert (soak.counts["found in the cache"] > 30) == (kv_cache == "prefix")
    assert soak.counts["aborted"] > 20
    assert set(soak.ledger.ended) == {"stop", "length", "abort"}
    if scheduler == "continuous":
        assert soak.counts["put back"] > 30
