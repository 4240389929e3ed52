"""10^5 random events for each of many combinations: nothing lost, nothing leaked, and memory that does not grow.

pytest benchmarks/test_soak.py -s
"""

from __future__ import annotations

import gc
import itertools
import sys
from typing import Any

import numpy as np
import psutil
import pytest

import nanofw
from nanofw.build import build_model
from nanofw.config import Config
from nanofw.llm import LLM
from nanofw.plugins import PluginHost
from nanofw.request import RequestOutput, SamplingParams
from nanofw.testing.audited import audited_engine, nothing_left
from nanofw.testing.plain_attention import PlainAttention
from nanofw.testing.soak import Soak
from nanofw.weights import resolve

EVENTS = 100_000
OBJECTS, MIB = 3000, 4
"""What memory may grow by from the 10,000th event to the last, in objects and in all: noise."""

FCFS: dict[str, str] = {}
SHORTEST = {"order": "shortest", "victim": "least-lost"}
RESERVE = {"order": "priority", "admission": "reserve"}
PIECES, WHOLE = 12, 512
"""Tokens a step: prompts in chunks, or in one piece."""

COMBINATIONS = [
    *(("continuous", FCFS, *rest, "eager") for rest in itertools.product(("paged", "prefix"), (0, 1), (PIECES, WHOLE))),
    *(("continuous", SHORTEST, "prefix", depth, PIECES, "eager") for depth in (0, 1)),
    *(("continuous", RESERVE, "prefix", depth, WHOLE, "eager") for depth in (0, 1)),
    *(("continuous", FCFS, "prefix", depth, PIECES, "cuda-graph") for depth in (0, 1)),  # static buffers on a CPU
    *(("static", FCFS, "prefix", depth, PIECES, "eager") for depth in (0, 1)),
]


class Plugin:
    """An attention that can be captured, and needs no GPU."""

    nanofw_api = nanofw.API

    @staticmethod
    @nanofw.hookimpl
    def nanofw_register_attention(register: Any) -> None:
        """As `plain`."""
        register("plain", PlainAttention)


@pytest.fixture(scope="module")
def plain_host() -> PluginHost:
    """The plugins of this test."""
    loaded = PluginHost.load(only=("basics", "cudagraph"))
    loaded.register(Plugin, "plain")
    return loaded


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("scheduler", "policies", "kv_cache", "depth", "budget", "runner"),
    COMBINATIONS,
    ids=["-".join([c[0], *c[1].values(), c[2], f"depth{c[3]}", f"budget{c[4]}", c[5]]) for c in COMBINATIONS],
)
def test_soak(
    benchmark,
    plain_host: PluginHost,
    scheduler: str,
    policies: dict[str, str],
    kv_cache: str,
    depth: int,
    budget: int,
    runner: str,
) -> None:
    """Adds, aborts, forks, preemptions, hits, ends and failures; the cache's integrity and all tokens are checked."""
    buckets = {"buckets": [1, 2, 4], "contexts": [16]} if runner == "cuda-graph" else {}
    engine = audited_engine(
        plain_host,
        (2, 17),
        attention="plain",
        runner=runner,
        device="cpu",
        scheduler=scheduler,
        kv_cache=kv_cache,
        steps_in_flight=depth,
        kv_blocks=24,
        max_num_seqs=8,
        max_batch_tokens=budget,
        options={"kv_cache": {"block_size": 4}, "scheduler": policies, "runner": buckets},
    )
    soak = Soak(engine)
    soak.run(EVENTS // 10)
    before = _memory()
    benchmark.pedantic(soak.run, args=(EVENTS,), rounds=1)
    objects, mib = (now - then for now, then in zip(_memory(), before, strict=True))
    benchmark.extra_info |= {**soak.counts, "grown_objects": objects, "grown_mib": round(mib, 2)}
    what = " ".join([scheduler, *policies.values(), kv_cache, runner])
    grown = f"grown by {objects:,.0f} objects, {mib:.1f} MiB"
    print(f"\n{what}, depth {depth}, budget {budget}: {soak.events:,} events {soak.counts}, {grown}")
    assert objects <= OBJECTS, grown
    assert mib <= MIB, grown


def _memory() -> tuple[int, float]:
    """Objects, and MiB of the whole process."""
    gc.collect()
    return sys.getallocatedblocks(), psutil.Process().memory_info().rss / 2**20


def test_real_requests(benchmark, host: PluginHost) -> None:
    """2,000 requests of a real model in a cramped pool with everything on: the tokens of a roomy plain one."""
    source = resolve("dummy:tiny")
    plain = Config(model="dummy:tiny", device="cpu", kv_blocks=2000, max_model_len=256)
    model = build_model(plain, host, source)
    draw = np.random.default_rng(0)
    families = draw.integers(0, 256, (20, 120))
    prompts = [families[draw.integers(20), : draw.integers(1, 120)].tolist() for _ in range(2000)]
    how = [SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=1 + i % 20) for i in range(2000)]
    cramped = plain.replace(kv_cache="prefix", kv_blocks=40, max_num_seqs=32, max_batch_tokens=64, steps_in_flight=1)

    def serve(config: Config) -> list[RequestOutput]:
        llm = LLM(config=config, host=host, source=source, loaded=model)
        outputs = llm.generate(prompts, how)
        nothing_left(llm.engine)
        return outputs

    expected, found = serve(plain), benchmark.pedantic(serve, args=(cramped,), rounds=1)
    assert [o.outputs for o in found] == [o.outputs for o in expected]
    put_back, cached = sum(o.preemptions for o in found), sum(o.cached_tokens for o in found)
    print(
        f"\n2,000 requests of dummy:tiny: {put_back} put back, {cached:,} tokens found in the cache, all tokens equal"
    )
