"""Tokens computed for 64 requests that share a 512-token prefix. Aim: at most 1/8 of what the plain cache computes.

pytest benchmarks/test_prefix_cache.py -s
"""

from __future__ import annotations

import pytest

from nanofw.measure.judged import judged
from nanofw.plugins import PluginHost
from nanofw.request import SamplingParams
from nanofw.testing.audited import audited_engine, audited_steps, prompt

AIM = 1 / 8


@pytest.mark.gate(time=None)  # once, and what counts is counted
@pytest.mark.parametrize("depth", [0, 1])
def test_shared_prefix(benchmark, host: PluginHost, depth: int) -> None:
    """All 64 arrive at once, each with 16 tokens of its own."""
    computed = {}

    def serve() -> None:
        for kv_cache in ("paged", "prefix"):
            settings = {"kv_cache": kv_cache, "kv_blocks": 64 * 34, "max_model_len": 600, "steps_in_flight": depth}
            engine = audited_engine(host, **settings)
            for number in range(64):
                tokens = prompt(512, 0) + prompt(16, number)
                engine.add(f"{number}", tokens, SamplingParams(temperature=0, max_tokens=1), stream=False)
            list(engine.run())
            computed[kv_cache] = sum(step.num_tokens for step in audited_steps(engine))

    benchmark.pedantic(serve, rounds=1)
    share = computed["prefix"] / computed["paged"]
    benchmark.extra_info["aim"] = AIM
    judged(benchmark, "count", **computed)
    judged(benchmark, "cost", share=round(share, 4))
    print(f"\ndepth {depth}: {computed['prefix']:,} of {computed['paged']:,} prefill tokens, {share:.1%}")
    assert share <= AIM
