"""What a steady decode step costs on the host when the model costs nothing. Aim: 100 us + 1 us a sequence.

Run it as `pytest benchmarks/test_engine_overhead.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from nanofw.attention import Attention
from nanofw.batch import Batch
from nanofw.build import build_engine
from nanofw.config import Config
from nanofw.kv_cache import LayerKV
from nanofw.plugins import PluginHost
from nanofw.request import SamplingParams
from nanofw.testing.null import NullModel, NullSource

ROUNDS, STEPS = 50, 20
"""Steps are timed in runs: a clock read around each one would find caches that the clock's own bookkeeping filled."""


class FixedModel(NullModel):
    """The same logits for every row, whatever the tokens: not even an index is computed."""

    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """A view of one row."""
        return self._logits[:1].expand(batch.num_requests, -1)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batch", [1, 16, 256])
def test_steady_decode_step(benchmark, host: PluginHost, batch: int, depth: int) -> None:
    source = NullSource(max_len=2048)
    # naive-gather plans nothing, and a null model never attends: what is left is the engine.
    config = Config(attention="naive-gather", kv_blocks=256 * 128, max_num_seqs=256, steps_in_flight=depth)
    engine = build_engine(config, host, source, FixedModel(source))
    for number in range(batch):
        params = SamplingParams(temperature=0, max_tokens=2 * ROUNDS * STEPS)
        engine.add(f"r{number}", [1, 2, 3, 4, 5], params, stream=False)
    benchmark.pedantic(engine.step, rounds=ROUNDS, iterations=STEPS, warmup_rounds=5)
    assert len(engine.requests) == batch, "a request ended while steps were timed"
    benchmark.extra_info["aim_us"] = 100 + batch
    if benchmark.stats is not None:
        benchmark.extra_info["median_us"] = round(benchmark.stats.stats.median * 1e6, 1)
