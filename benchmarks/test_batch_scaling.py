"""Does decode scale with the batch? Every plugin in turn in place of a plain one, batch sizes 1 to 16.

The experiment of `nanofw bench`, as benchmarks: a round visits every combination at every batch size, speed-up and
exponent are taken within a round. An exponent of 0 means that a step costs the same whatever the batch, 1 that each
request pays for itself.

    pytest benchmarks/test_batch_scaling.py -k prefix      the plain plugins beside the KV cache `prefix`
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from nanofw.build import build_engine, build_model, resolve_device
from nanofw.config import Config
from nanofw.engine import Engine
from nanofw.errors import NanofwError
from nanofw.measure.combinations import one_at_a_time
from nanofw.measure.judged import judged
from nanofw.measure.replay import Replay
from nanofw.measure.sweep import Run, Workload, sweep
from nanofw.plugins import PluginHost
from nanofw.testing.right import assert_right
from nanofw.weights import resolve

ON_GPU = resolve_device("auto").type == "cuda"
MODEL = "dummy:qwen3-0.6b" if ON_GPU else "dummy:tiny"
PROMPT, OUTPUT = 64, 17
BATCHES = (1, 2, 4, 8, 16)
COMBINATIONS = one_at_a_time(PluginHost.load(), ON_GPU)


@dataclass(frozen=True)
class Measured:
    """Runs by (combination, batch size), the engines, and why some combinations have none."""

    runs: Mapping[tuple[str, int], Sequence[Run]]
    engines: Mapping[str, Engine]
    reasons: Mapping[str, NanofwError | AssertionError]


@pytest.fixture(scope="module")
def measured(host: PluginHost, quick: bool, request: pytest.FixtureRequest) -> Measured:
    """Every combination that a selected test asks for, in one sweep."""
    items = [i for i in request.session.items if i.path == request.path]
    wanted = {item.callspec.params["combination"] for item in items}
    source, models = resolve(MODEL), {}
    engines, reasons = {}, {}
    for name in [name for name in COMBINATIONS if name in wanted]:
        sizes = {"model": MODEL, "max_num_seqs": max(BATCHES), "max_model_len": PROMPT + OUTPUT}
        config = Config.build(sizes, COMBINATIONS[name])
        try:
            if config.model_impl not in models:
                models[config.model_impl] = build_model(config, host, source)
            engines[name] = build_engine(config, host, source, models[config.model_impl])
            attention = engines[name].runner.parts.attention
            assert_right(type(attention), attention.spec)
        except (NanofwError, AssertionError) as error:
            engines.pop(name, None)
            reasons[name] = error
    work = Workload.random(max(BATCHES), PROMPT, OUTPUT, source.config.vocab_size)
    rounds = 2 if quick else 3 if ON_GPU else 5
    runs = sweep(engines, work, BATCHES, rounds) if engines else {}
    return Measured(runs, engines, reasons)


@pytest.mark.benchmark(group="decode step by batch size")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_decode(replay: Replay, measured: Measured, read_bandwidth: float, combination: str, batch: int) -> None:
    """Time of one decode step, the mean over a run."""
    error = measured.reasons.get(combination)
    if isinstance(error, AssertionError):
        pytest.fail(f"not timed, because its attention is wrong: {error}", pytrace=False)
    if error is not None:
        pytest.skip(str(error))
    runs, base = (measured.runs[combination, size] for size in (batch, BATCHES[0]))
    seconds = [run.decode_ms / 1e3 for run in runs]
    replay(seconds, tok_s=statistics.median(run.decode_tok_s for run in runs))
    spec = measured.engines[combination].runner.parts.model.spec
    kv = sum(layer.num_kv_heads * layer.head_size for layer in spec.layers) * 2 * spec.dtype.itemsize
    size = spec.weight_bytes + batch * (PROMPT + OUTPUT // 2) * kv
    replay.benchmark.extra_info["bandwidth_share"] = size / statistics.median(seconds) / read_bandwidth
    ratios = [run.decode_tok_s / first.decode_tok_s for run, first in zip(runs, base, strict=True)]
    replay.benchmark.extra_info["speedup"] = statistics.median(ratios)
    if batch == BATCHES[-1]:  # those before it say the same with more noise
        judged(replay.benchmark, "gain", speedup=ratios)
        rounds = zip(*(measured.runs[combination, size] for size in BATCHES), strict=True)
        judged(replay.benchmark, "exponent", exponent=list(map(exponent, rounds)))


def exponent(runs: Sequence[Run]) -> float:
    """The x of `step time = c * batch ** x` that fits one round best, by least squares over the logarithms."""
    sizes, times = ([math.log(value) for value in of] for of in ([r.batch for r in runs], [r.decode_ms for r in runs]))
    return statistics.linear_regression(sizes, times).slope
