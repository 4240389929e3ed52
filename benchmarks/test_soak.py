"""10^5 random events for each scheduler and depth: nothing lost, nothing leaked, and memory that does not grow.

pytest benchmarks/test_soak.py -s
"""

from __future__ import annotations

import gc

import psutil
import pytest

from nanofw.plugins import PluginHost
from nanofw.testing.audited import audited_engine
from nanofw.testing.soak import Soak

EVENTS = 100_000


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kv_cache", ["paged", "prefix"])
@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_soak(benchmark, host: PluginHost, scheduler: str, kv_cache: str, depth: int) -> None:
    settings = {"kv_blocks": 24, "max_num_seqs": 8, "max_batch_tokens": 48, "options": {"kv_cache": {"block_size": 4}}}
    kinds = {"scheduler": scheduler, "kv_cache": kv_cache}
    engine = audited_engine(host, (2, 17), steps_in_flight=depth, **kinds, **settings)
    soak, process = Soak(engine), psutil.Process()
    soak.run(EVENTS // 10)
    gc.collect()
    before = process.memory_info().rss
    benchmark.pedantic(soak.run, args=(EVENTS,), rounds=1)
    gc.collect()
    grown = (process.memory_info().rss - before) / 2**20
    benchmark.extra_info |= {**soak.counts, "grown_mib": round(grown, 2)}
    print(f"\n{scheduler}, {kv_cache}, depth {depth}: {soak.events:,} events {soak.counts}, grown by {grown:.1f} MiB")
