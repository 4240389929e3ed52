"""256 requests at once, random prompts and outputs of 100 to 1,024 tokens (seed 0); a twentieth of that on a CPU.

The load for which continuous batching was made: a static batch waits for its longest request. On a GPU it is the fast
path that serves, as in `benchmarks/gpu.py mixed`, which judges it against the figures of other engines.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import pytest

from nanofw.build import build_model, resolve_device
from nanofw.config import Config
from nanofw.llm import LLM
from nanofw.measure.judged import judged
from nanofw.measure.replay import Replay
from nanofw.plugins import PluginHost
from nanofw.request import SamplingParams
from nanofw.weights import resolve

ON_GPU = resolve_device("auto").type == "cuda"
REQUESTS, TEMPERATURE = 256, 0.6
MODEL, LEAST, MOST = ("dummy:qwen3-0.6b", 100, 1024) if ON_GPU else ("dummy:tiny", 5, 51)
ENGINE: dict[str, Any] = {"model": MODEL, "max_model_len": 2 * MOST}
if ON_GPU:
    ENGINE |= {"model_impl": "fused", "attention": "triton-paged", "sampler": "triton", "runner": "cuda-graph"}
    ENGINE |= {"steps_in_flight": 1, "max_batch_tokens": 8192, "kv_memory": "30GiB"}
    ENGINE["options"] = {"runner": {"buckets": [1, 4, *range(8, 257, 8)], "contexts": [1024]}}
else:
    ENGINE |= {"max_num_seqs": 64, "kv_blocks": 64 * 8}
COMBINATIONS = {"continuous": {}, "static": {"scheduler": "static"}, "prefix": {"kv_cache": "prefix"}}


@pytest.fixture(scope="module")
def times(host: PluginHost, quick: bool) -> dict[str, list[float]]:
    """Seconds of the whole load, one value a round: all combinations in turns."""
    source, config = resolve(MODEL), Config.build(ENGINE)
    model = build_model(config, host, source)
    work, params = load(source.config.vocab_size, REQUESTS // 8 if quick else REQUESTS)
    llms = {
        name: LLM(config=config.replace(**how), host=host, source=source, loaded=model)
        for name, how in COMBINATIONS.items()
    }
    for llm in llms.values():
        llm.generate(work[:64], params[:64])  # warm-up
    shuffle, found = random.Random(0).shuffle, {name: [] for name in llms}
    for _ in range(1 if quick else 3):
        order = list(llms)
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            made = llms[name].generate(work, params)
            seconds = time.perf_counter() - start
            assert [len(o.outputs[0].token_ids) for o in made] == [p.max_tokens for p in params]
            found[name].append(seconds)
    return found


def load(vocab_size: int, requests: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, and what is wanted of each."""
    rng = random.Random(0)
    work = [[rng.randrange(vocab_size) for _ in range(rng.randint(LEAST, MOST))] for _ in range(requests)]
    sizes = [rng.randint(LEAST, MOST) for _ in work]
    return work, [SamplingParams(max_tokens=size, temperature=TEMPERATURE, ignore_eos=True) for size in sizes]


@pytest.mark.gate(speedup=0.25)
@pytest.mark.benchmark(group="mixed load")
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_mixed_load(replay: Replay, times: dict[str, list[float]], quick: bool, combination: str) -> None:
    """All requests from the first to the last token; `speed-up` is over static batches."""
    seconds, (_, params) = times[combination], load(2, REQUESTS // 8 if quick else REQUESTS)
    tokens = sum(p.max_tokens for p in params)
    replay(seconds, tok_s=tokens / statistics.median(seconds), tokens=tokens)
    ratios = [static / mine for static, mine in zip(times["static"], seconds, strict=True)]
    judged(replay.benchmark, "gain", speedup=ratios)
