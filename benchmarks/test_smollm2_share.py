"""The engine's own share of a SmolLM2 decode step at batch 1. Aim: below 3 %.

Run it as `nanofw model pull smollm2 && pytest -s benchmarks/test_smollm2_share.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from nanofw.attention import Attention
from nanofw.batch import Batch
from nanofw.build import build_engine, build_model
from nanofw.config import Config
from nanofw.errors import CheckpointError
from nanofw.kv_cache import LayerKV
from nanofw.measure.judged import judged
from nanofw.model import Model
from nanofw.plugins import PluginHost
from nanofw.request import SamplingParams
from nanofw.weights import resolve


class TimedModel(Model):
    """Another model, with a clock around its forward pass."""

    def __init__(self, inner: Model) -> None:
        self.inner, self.spec = inner, inner.spec
        self.seconds: list[float] = []

    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """Time it."""
        started = time.perf_counter()
        logits = self.inner.forward(batch, attention, kv)
        self.seconds.append(time.perf_counter() - started)
        return logits


def test_share_of_a_decode_step(benchmark, host: PluginHost) -> None:
    config = Config(model="smollm2", kv_blocks=64, max_num_seqs=1)
    try:
        source = resolve("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    model = TimedModel(build_model(replace(config), host, source))
    engine = build_engine(config, host, source, model)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    engine.add("r", source.load_tokenizer().encode("The capital of France is"), params, stream=False)
    for _ in range(10):
        engine.step()
    model.seconds.clear()
    whole: list[float] = []

    def step() -> None:
        started = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - started)

    benchmark.pedantic(step, rounds=100)
    own = statistics.median(all_ - forward for all_, forward in zip(whole, model.seconds, strict=True))
    usual = statistics.median(whole)
    judged(benchmark, "cost", engine_share=round(own / usual, 4))
    print(f"\nengine's share of a step: {own / usual:.2%} ({own * 1e6:.0f} us of {usual * 1e3:.1f} ms, medians)")
