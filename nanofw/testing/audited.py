"""Real engines with a model whose tokens are known, whose every step is looked at.

Each token depends on the whole context as the KV cache holds it, so one that is lost, repeated, or computed from the
wrong context is found at once; and between scheduler and runner an `Auditor` looks at what is scheduled.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import nanofw
from nanofw.batch import NULL_BLOCK, Step
from nanofw.build import build_engine
from nanofw.component import Component, Kind
from nanofw.config import Config
from nanofw.engine import Engine
from nanofw.kv_cache import KVCache
from nanofw.plugins import PluginHost
from nanofw.request import RequestOutput, SamplingParams
from nanofw.runner import Pending, Runner
from nanofw.testing.null import ContextModel, NullSource

NAME = "under-test"


@functools.cache
def host_with(kind: Kind, backend: type[Component]) -> PluginHost:
    """The plain plugins, and `backend` as `under-test`."""

    def hook(register: Any) -> None:
        register(NAME, backend)

    hook.__name__ = f"nanofw_register_{kind}"
    plugin = type("Plugin", (), {"nanofw_api": nanofw.API, hook.__name__: staticmethod(nanofw.hookimpl(hook))})
    host = PluginHost.load(only=("basics", "gather"))
    host.register(plugin, NAME)
    return host


def audited_engine(host: PluginHost, eos_token_ids: tuple[int, ...] = (), **changes: Any) -> Engine:
    """An engine with a `ContextModel`, its steps audited. `changes` are settings, `kv_blocks=64` unless given."""
    source = NullSource(eos_token_ids=eos_token_ids)
    settings_ = {"attention": "naive-gather", "device": "cpu", "kv_blocks": 64, "max_model_len": 256} | changes
    engine = build_engine(Config.build(settings_), host, source, model=context_model(source.vocab_size))
    engine.runner = Auditor(engine)
    return engine


@functools.cache
def context_model(vocab_size: int = 128) -> ContextModel:
    """One for all: it has no state."""
    return ContextModel(NullSource(vocab_size))


def prompt(length: int, seed: int) -> list[int]:
    """Token ids."""
    return np.random.default_rng([seed, length]).integers(0, 128, length).tolist()  # type: ignore[no-any-return]


class Auditor(Runner):
    """Looks at each step before the real runner gets it; `steps` keeps them, unless `keep` is off."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.inner = engine, engine.runner
        self.parts, self.options, self.report = self.inner.parts, self.inner.options, self.inner.report
        self.keep = True
        self.steps: list[Step] = []
        self.reached: dict[int, tuple[int, int]] = {}  # by row: its ticket, and tokens computed

    def submit(self, step: Step) -> Pending:
        """Check what can be checked of a step, then submit it."""
        cache, limits = self.engine.kv_cache, self.engine.scheduler.limits
        assert 1 <= step.num_requests <= limits.max_num_seqs, f"{step.num_requests} requests in a step"
        assert 1 <= step.num_tokens <= limits.max_batch_tokens, f"{step.num_tokens} tokens in a step"
        assert len(set(step.rows.tolist())) == step.num_requests, "a request is twice in a step"
        assert (step.query_lens >= 1).all(), "a request with nothing to compute"
        assert int(step.query_lens.sum()) == step.num_tokens
        blocks = step.slot_mapping // cache.block_size
        assert (blocks != NULL_BLOCK).all(), "a token has no block"
        assert len(set(step.slot_mapping.tolist())) == step.num_tokens, "two tokens share a slot"
        for row, ticket, query_len, seq_len in zip(
            step.rows.tolist(), step.tickets.tolist(), step.query_lens.tolist(), step.seq_lens.tolist(), strict=True
        ):
            holder, reached = self.reached.get(row, (-1, 0))
            start = reached if holder == ticket else None
            if start is None and type(cache).match_prefix is KVCache.match_prefix:
                start = 0  # nothing can be cached
            assert start is None or seq_len - query_len == start, f"row {row}: tokens skipped or computed twice"
            self.reached[row] = (ticket, seq_len)
        cache.check_integrity()
        if self.keep:
            self.steps.append(step)
        return self.inner.submit(step)


def audited_steps(engine: Engine) -> list[Step]:
    """The steps that an `audited_engine` has submitted."""
    assert isinstance(engine.runner, Auditor)
    return engine.runner.steps


def nothing_left(engine: Engine) -> None:
    """No request, row or block is held."""
    assert not engine.requests
    assert engine.scheduler.num_waiting == 0
    assert engine.table.free_rows == engine.table.rows
    assert engine.kv_cache.free_blocks == engine.kv_cache.num_blocks - 1
    engine.kv_cache.check_integrity()


def run(engine: Engine, work: Sequence[tuple[Sequence[int], int]]) -> list[RequestOutput]:
    """Greedy outputs of (prompt, max_tokens) pairs, in order; fails if the engine takes unreasonably many steps."""
    for i, (tokens, count) in enumerate(work):
        engine.add(str(i), tokens, SamplingParams(temperature=0, max_tokens=count), stream=bool(i % 2))
    finished: dict[str, RequestOutput] = {}
    bound = 10 + 4 * sum(len(tokens) + count for tokens, count in work)
    for _ in range(bound):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished, "ended twice"
                finished[output.request_id] = output
    else:
        pytest.fail(f"unfinished after {bound} steps: {sorted(engine.requests)}")
    return [finished[str(i)] for i in range(len(work))]


def left_behind(engine: Engine, work: Sequence[tuple[Sequence[int], int]], rounds: int = 4) -> float:
    """Objects that stay in memory for each request of `work`, as the median of some rounds.

    As many rounds go before them: what Python and numpy keep at hand for later fills up at first.
    """
    assert isinstance(engine.runner, Auditor)
    engine.runner.keep = False
    counts = []
    for _ in range(2 * rounds):
        run(engine, work)
        gc.collect()
        counts.append(sys.getallocatedblocks())
    return statistics.median(after - before for before, after in itertools.pairwise(counts[rounds - 1 :])) / len(work)


def run_params(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[tuple[int, ...]]:
    """Tokens of prompts with their parameters, in order."""
    for i, (tokens, how) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), tokens, how, stream=False)
    finished = {o.request_id: o.outputs[0].token_ids for o in engine.run() if o.finished}
    nothing_left(engine)
    return [finished[str(i)] for i in range(len(prompts))]


def check(engine: Engine, work: Sequence[tuple[Sequence[int], int]], outputs: Sequence[RequestOutput]) -> None:
    """The model's tokens, all of them unless the pool or the length limit cut them short; nothing left behind."""
    for (tokens, count), output in zip(work, outputs, strict=True):
        completion = output.outputs[0]
        expected = context_model().greedy(tokens, count)
        if completion.finish_reason in ("kv_capacity", "context"):
            expected = expected[: len(completion.token_ids)]
        assert list(completion.token_ids) == expected
    nothing_left(engine)
