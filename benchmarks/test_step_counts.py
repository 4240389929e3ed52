"""What one decode step of a whole engine does, counted: operations, bytes, host reads, launches, Python calls.

Each plugin in turn in place of a plain one, with the model dummy:tiny. No clock decides anything here, so these hold on
a busy machine too. Laws (docs/explanation/laws.md) say how counts grow; the gate, when a step does more than it did.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from nanofw.build import build_engine, resolve_device
from nanofw.config import Config
from nanofw.errors import NanofwError
from nanofw.measure.combinations import one_at_a_time
from nanofw.measure.counters import step_counts
from nanofw.measure.judged import judged
from nanofw.plugins import PluginHost
from nanofw.weights import resolve

MODEL, BATCH, CONTEXT = "dummy:tiny", 4, 40
COMBINATIONS = one_at_a_time(PluginHost.load(), on_gpu=resolve_device("auto").type == "cuda")


@pytest.mark.gate(time=None, python_calls=50)  # the libraries below call now a few more, now a few less
@pytest.mark.benchmark(group="counts of a decode step (the time is that of counting)")
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_step_counts(benchmark, host: PluginHost, combination: str) -> None:
    settings = {"model": MODEL, "max_num_seqs": BATCH, "max_model_len": 64}
    try:
        engine = build_engine(Config.build(settings, COMBINATIONS[combination]), host, resolve(MODEL))
    except NanofwError as error:
        pytest.skip(str(error))
    step_counts(engine, BATCH, CONTEXT)  # the first step of an engine fills caches
    counts = benchmark.pedantic(step_counts, args=(engine, BATCH, CONTEXT))
    judged(benchmark, "count", **asdict(counts))
