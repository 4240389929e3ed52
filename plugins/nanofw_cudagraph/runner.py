"""The CUDA-graph runner: one launch a decode step, whatever the number of kernels in it.

A decode step of a small model is some hundred kernels of a few microseconds; launching them from Python takes longer
than running them. A graph is captured once for each bucket of batch sizes and then replayed with one call. Steps that
prefill have no fixed shape and run eagerly; decode batches above the largest bucket do too, counted and reported.

On a CPU the same code runs the step over its static buffers without a graph, so buckets, padding and buffers can be
tested anywhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanofw.batch import Step
from nanofw.progress import doing
from nanofw.runner import OnDevice, Parts, Pending, Runner, RunnerReport
from nanofw.sampler import Sampled
from nanofw_cudagraph.buffers import StaticInputs

Key = tuple[int, int, tuple[bool, bool, int] | None]
"""Bucket, block-table columns, and how it samples (greedy, truncated, logprobs; None: plain arg-max)."""


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A step that can be replayed: inputs are filled, `replay` runs, `sampled` holds the results."""

    inputs: StaticInputs
    replay: Callable[[], None]
    sampled: Sampled


class CudaGraphRunner(Runner):
    """Replays decode steps of up to `max_batch` requests; prefill runs eagerly."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """Which steps are captured.

        Attributes:
            buckets: batch sizes; a step takes the smallest that holds it. Empty: 1, 2, 4, then every 8th to 256.
            contexts: bounds of context length in tokens; each makes its own graphs, so that short contexts need not be
                split as if they were long. The longest possible context is always among them.
        """

        buckets: tuple[int, ...] = ()
        contexts: tuple[int, ...] = (256, 2048)

        def __post_init__(self) -> None:
            if any(n < 1 for n in (*self.buckets, *self.contexts)):
                raise ValueError("buckets and contexts must be at least 1")

    options: Options

    @classmethod
    def validate(cls, parts: Parts) -> list[str]:
        """The attention must be free of host reads and of launches that depend on lengths."""
        if not parts.attention.capabilities.graphs:
            return [f"attention that can be captured ({type(parts.attention).__name__} does not declare graphs=True)"]
        return []

    def __init__(self, parts: Parts, options: Options) -> None:
        super().__init__(parts, options)
        wanted = sorted(options.buckets) or [1, 2, 4, *range(8, 257, 8)]
        self.buckets = sorted({min(b, parts.rows) for b in wanted})
        cache = parts.kv_cache
        full = cache.block_table.shape[1]
        self.columns = sorted({min(cache.blocks_for(c), full) for c in options.contexts} | {full})
        self._last_token = torch.zeros(parts.rows + 2, dtype=torch.int64, device=parts.device)
        self._captured: dict[Key, Captured] = {}
        self._pool: Any = None
        on_gpu = parts.device.type == "cuda"
        self.report = RunnerReport(path="cuda-graph" if on_gpu else "static buffers, no graph (no GPU)")

    def warm_up(self) -> None:
        """Capture plain greedy steps of every bucket, the largest first, so that the smaller reuse its memory."""
        if self.parts.device.type != "cuda":
            return
        torch.cuda.empty_cache()  # what is cached would be freed by the first capture, and counted as saved
        before = torch.cuda.memory_reserved(self.parts.device)
        wanted: list[Key] = [
            (size, columns, None) for size in reversed(self.buckets) for columns in reversed(self.columns)
        ]
        for number, key in enumerate(wanted):
            doing(f"capturing graph {number + 1} of {len(wanted)}, for {key[0]} requests")
            self._capture(key, None)
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved(self.parts.device) - before
        self.report.path = f"cuda-graph ({len(self._captured)} graphs, {used / 2**20:.0f} MiB)"

    @torch.inference_mode()
    def submit(self, step: Step) -> Pending:
        """Replay a decode step; run any other eagerly."""
        self.report.steps += 1
        if step.max_query_len > 1:
            return self.run_eagerly(step, self._last_token)
        if step.num_requests > self.buckets[-1]:
            reason = f"more than {self.buckets[-1]} requests, the largest bucket"
            self.report.fallbacks[reason] = self.report.fallbacks.get(reason, 0) + 1
            return self.run_eagerly(step, self._last_token)
        captured = self._find(step)
        captured.inputs.fill(step)
        captured.replay()
        return OnDevice(_first(captured.sampled, step.num_requests))

    def _find(self, step: Step) -> Captured:
        size = self.buckets[bisect.bisect_left(self.buckets, step.num_requests)]
        columns = self.columns[bisect.bisect_left(self.columns, step.block_table.shape[1])]
        how = step.sampling
        key = (size, columns, None if how is None else (how.greedy, how.truncated, how.logprobs))
        return self._captured.get(key) or self._capture(key, step)

    @torch.inference_mode()
    def _capture(self, key: Key, step: Step | None) -> Captured:
        """Record a step. Kernels are compiled by running it first, on padding, which touches no request."""
        size, columns, _ = key
        parts = self.parts
        inputs = StaticInputs(size, columns, parts.rows, parts.device)
        inputs.on_device["slots"].fill_(-1)
        inputs.on_device["rows"].fill_(parts.rows)
        inputs.on_device["feeds"].fill_(inputs.zero_row)
        sampling = step.sampling if step is not None else None

        def run() -> Sampled:
            batch = inputs.batch(self._last_token, parts.kv_cache.block_size)
            batch = batch.with_plan(parts.attention.plan(batch))  # in the graph: it may read lengths on the device
            logits = parts.model.forward(batch, parts.attention, parts.kv_cache.layers)
            sampled = parts.sampler.sample(logits, inputs.sampling(sampling))
            self._last_token.index_copy_(0, inputs.on_device["rows"], sampled.tokens)
            return sampled

        on_gpu = parts.device.type == "cuda"
        captured = self._record(inputs, run) if on_gpu else _Rerun(inputs, run).captured
        self._captured[key] = captured
        return captured

    def _record(self, inputs: StaticInputs, run: Callable[[], Sampled]) -> Captured:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            sampled = run()
        self._pool = self._pool or graph.pool()
        return Captured(inputs, graph.replay, sampled)


class _Rerun:
    """What a CPU does in place of a graph: run the step again, into the same outputs."""

    def __init__(self, inputs: StaticInputs, run: Callable[[], Sampled]) -> None:
        self._run = run
        self.captured = Captured(inputs, self.replay, run())

    @torch.inference_mode()
    def replay(self) -> None:
        new, static = self._run(), self.captured.sampled
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
            if (target := getattr(static, name)) is not None:
                target.copy_(getattr(new, name))


def _first(sampled: Sampled, count: int) -> Sampled:
    """The rows of the live requests. A GPU copies them out before the next replay; a CPU has to do it here."""
    fields = (sampled.tokens, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
    on_gpu = sampled.tokens.device.type == "cuda"
    tokens, *rest = (None if t is None else t[:count] if on_gpu else t[:count].clone() for t in fields)
    assert tokens is not None
    return Sampled(tokens, *rest)
