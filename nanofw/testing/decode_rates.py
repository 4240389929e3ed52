"""Decode throughput of a whole engine, measured point by point: what scaling laws are judged by."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from nanofw import launch
from nanofw.build import build_engine
from nanofw.config import Config
from nanofw.errors import PluginError
from nanofw.measure.sweep import WARM_UP_TOKENS, Workload, run_batch
from nanofw.plugins import PluginHost
from nanofw.weights import resolve

STEPS = 16
"""Decode steps that a measurement lasts."""


class DecodeRates:
    """Measures one engine; see `nanofw.testing.scaling.Measure`.

    Args:
        config: which plugins and model; its sizes are set by `points`. host: where the plugins are.
        points: (batch size, context) of all that will be asked for. Each is warmed up.

    Raises:
        PluginError: the plugins cannot serve each other, or their kernels run in Triton's interpreter, whose times say
            nothing about a GPU's.
    """

    def __init__(self, config: Config, host: PluginHost, points: Collection[tuple[int, int]]) -> None:
        source = resolve(config.model)
        largest, longest = max(batch for batch, _ in points), max(context for _, context in points)
        sizes = replace(config, max_num_seqs=largest, max_model_len=longest + STEPS + 1)
        vocab = source.config.vocab_size
        self.work = {c: Workload.random(largest, c, STEPS + 1, vocab) for c in {context for _, context in points}}
        self.engine = build_engine(sizes, host, source)
        with _undisturbed(), launch.counting() as launched:
            for batch, context in points:
                run_batch(self.engine, replace(self.work[context], output_tokens=WARM_UP_TOKENS), batch)
        if launched and launch.interpreted():
            raise PluginError(f"its kernels run in Triton's interpreter here ({launched[0]}): times say nothing")

    def __call__(self, batch: int, context: int) -> float:
        """Tokens a second, once all requests decode."""
        with _undisturbed():
            return run_batch(self.engine, self.work[context], batch).decode_tok_s


@contextmanager
def _undisturbed() -> Iterator[None]:
    """One thread: those that share out operations this small measure who else uses the machine.

    And what is there already need not be looked through by the collector, before a run or in it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)
