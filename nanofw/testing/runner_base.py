"""What all runner checks share: the same steps through the runner under test and through plain eager ones, compared."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from nanofw.attention import Attention, AttentionSpec
from nanofw.batch import Step
from nanofw.component import NoOptions
from nanofw.model import Model
from nanofw.options import build_options
from nanofw.request import SamplingParams
from nanofw.runner import HostSampled, Parts, Pending, Runner, RunnerReport
from nanofw.testing.by_hand import GREEDY, ByHand, default_sampler
from nanofw.testing.plain_attention import PlainAttention
from nanofw.testing.small_model import SmallModel
from nanofw.testing.suite import Suite, environment_seed

MAX_LEN, BLOCK_SIZE = 64, 4
ROUNDING = {torch.float64: 1e-5, torch.float32: 5e-4, torch.float16: 5e-2, torch.bfloat16: 0.3}
"""How far log-probabilities, in float32, may be from the eager ones: a batch of another size rounds otherwise."""


class PlainRunner(Runner):
    """Every step launched operation by operation: what all runners are compared with."""

    def __init__(self, parts: Parts, options: Any) -> None:
        super().__init__(parts, options)
        self.report = RunnerReport("plain")
        self._last_token = torch.zeros(parts.rows, dtype=torch.int64, device=parts.device)

    def submit(self, step: Step) -> Pending:
        """Run it."""
        return self.run_eagerly(step, self._last_token)


class Driven(ByHand):
    """A runner, and requests for it.

    Args:
        make: builds the runner. model, attention: what it runs. rows, blocks: see `ByHand`.
    """

    def __init__(
        self, make: Callable[[Parts], Runner], model: Model, attention: Attention, *, rows: int, blocks: int
    ) -> None:
        super().__init__(model.spec, rows=rows, max_len=MAX_LEN, blocks=blocks, block_size=BLOCK_SIZE)
        device = model.spec.device
        self.runner = make(Parts(model, attention, self.cache, default_sampler(), device, rows, rows * MAX_LEN))
        self.in_flight: deque[tuple[Step, Pending]] = deque()
        self.poison = 30.0 if attention.capabilities.reads_padding else math.nan

    def submit(self, work: Mapping[int, int]) -> Step:
        """Start a step that computes so many tokens of each row."""
        step = self.plan(work)
        self.in_flight.append((step, self.runner.submit(step)))
        return step

    def collect(self) -> tuple[Step, HostSampled]:
        """Wait for the oldest step in flight and take its tokens in."""
        step, pending = self.in_flight.popleft()
        found = pending.wait()
        if found.tokens.shape != (step.num_requests,) or found.tokens.dtype != np.int64:
            got = f"{found.tokens.shape} {found.tokens.dtype}"
            raise AssertionError(f"{describe(step)}: tokens are {got}, must be ({step.num_requests},) int64")
        self.take(step, found.tokens)
        return step, found


class Twin:
    """Does everything twice, and compares what comes back.

    Args:
        mine: drives the runner under test. plain: drives plain eager steps over other parts of the same kind.
    """

    def __init__(self, mine: Driven, plain: Driven) -> None:
        self.mine, self.plain = mine, plain
        self.collected = 0

    def open(self, length: int, params: SamplingParams = GREEDY) -> int:
        """Begin a request with a prompt of its own, of so many tokens. Returns its row."""
        vocab, number = self.mine.runner.parts.model.spec.vocab_size, self.mine.opened
        prompt = np.random.default_rng([environment_seed(), number, length]).integers(0, vocab, length).tolist()
        row = self.mine.open(prompt, params)
        assert self.plain.open(prompt, params) == row
        return row

    def open_all(self, lengths: Sequence[int], params: SamplingParams = GREEDY) -> dict[int, int]:
        """Begin requests with prompts of these lengths. Returns the work of computing all of them."""
        return {self.open(length, params): length for length in lengths}

    def submit(self, work: Mapping[int, int]) -> Step:
        """Start a step."""
        self.plain.submit(work)
        return self.mine.submit(work)

    def collect(self) -> None:
        """Wait for the oldest step. Raises AssertionError that says what is not as in plain eager steps."""
        (step, found), (_, expected) = self.mine.collect(), self.plain.collect()
        rounding = ROUNDING[self.mine.runner.parts.model.spec.dtype]
        compare(found, expected, step, f"step {self.collected} ({describe(step)})", rounding)
        self.collected += 1

    def step(self, work: Mapping[int, int]) -> Step:
        """Start a step and wait for it."""
        step = self.submit(work)
        self.collect()
        return step

    def advance(self, work: Mapping[int, int], depth: int = 0) -> None:
        """Start a step, then wait until no more than `depth` are in flight."""
        self.submit(work)
        while len(self.mine.in_flight) > depth:
            self.collect()

    def decode(self, rows: Sequence[int] | Mapping[int, int], steps: int = 1, depth: int = 0) -> None:
        """Steps of one token for each row, so many in flight beyond the one that is waited for."""
        for _ in range(steps):
            self.advance(dict.fromkeys(rows, 1), depth)
        while self.mine.in_flight:
            self.collect()

    def close(self, rows: Sequence[int] | Mapping[int, int]) -> None:
        """End requests. What they held is poisoned: nobody may see it again."""
        for row in rows:
            held = self.mine.cache.block_table[row][self.mine.cache.block_table[row] > 0].tolist()
            self.mine.close(row)
            self.plain.close(row)
            for layer in self.mine.cache.layers:
                layer.key[held], layer.value[held] = self.mine.poison, self.mine.poison

    def needs(self, row: int) -> int:
        """Tokens that a request still has to compute before its next one can be chosen."""
        return int(self.mine.table.needs(np.array([row]))[0])

    def check_pools(self) -> None:
        """Every slot that plain steps wrote holds the same keys and values; the others are still poison."""
        for number, (found, expected) in enumerate(zip(self.mine.pools(), self.plain.pools(), strict=True)):
            written = expected.flatten(1).any(1)
            close = torch.isclose(found, expected, rtol=1e-3, atol=1e-3).flatten(1).all(1)
            wrong = (written & ~close).nonzero()[:, 0].tolist()
            what = f"{'value' if number % 2 else 'key'} of layer {number // 2}"
            assert not wrong, f"slots {wrong[:5]}: {what} is not what eager steps write"


class RunnerBase(Suite):
    """Base of the groups of checks.

    Attributes a subclass sets:
        backend: a subclass of `Runner`.
        rows: most requests at once, at least 5; checks go to one beyond its largest bucket, if that is fewer.
        device: where to test it; the environment's `NANOFW_TEST_DEVICE` if not given, else the CPU.
    """

    backend: ClassVar[type[Runner]]
    rows: ClassVar[int] = 10
    device: ClassVar[str | None] = None

    def make_model(self, device: torch.device) -> Model:
        """What the runner runs: override it for a runner that is made for some model. Deterministic."""
        return SmallModel(device)

    def make_attention(self, spec: AttentionSpec) -> Attention:
        """What it attends with: override it for a runner that needs another one."""
        return PlainAttention(spec, NoOptions())

    @classmethod
    def torch_device(cls) -> torch.device:
        """Where the checks run."""
        return torch.device(cls.device or os.environ.get("NANOFW_TEST_DEVICE") or "cpu")

    def build(self, parts: Parts) -> Runner:
        """The runner under test. Skips the test with its reasons if it does not run here, or not these parts."""
        reasons = [reason for reason in [self.backend.unavailable()] if reason] or self.backend.validate(parts)
        if reasons:
            pytest.skip(f"{self.backend.__name__} does not serve: {'; '.join(reasons)}")
        return self.backend(parts, build_options(self.backend.Options, self.options, self.backend.__name__))

    def drive(
        self,
        make: Callable[[Parts], Runner] | None = None,
        *,
        model: Model | None = None,
        blocks: int | None = None,
        warm: bool = True,
    ) -> Driven:
        """A runner, by default the one under test, warmed up, over a cache of its own. `blocks`: enough by default."""
        device = self.torch_device()
        model = model or self.make_model(device)
        spec = AttentionSpec(model.spec.layers, model.spec.dtype, device, BLOCK_SIZE)
        blocks = blocks or self.rows * (MAX_LEN // BLOCK_SIZE)
        driven = Driven(make or self.build, model, self.make_attention(spec), rows=self.rows, blocks=blocks)
        if warm:
            driven.runner.warm_up()
        return driven

    def twin(self, *, model: Model | None = None, blocks: int | None = None) -> Twin:
        """The runner under test and plain steps; `model` is for the former. Its cache is full of poison."""
        mine = self.drive(model=model, blocks=blocks)
        for layer in mine.cache.layers:
            layer.key.fill_(mine.poison)
            layer.value.fill_(mine.poison)
        return Twin(mine, self.drive(lambda parts: PlainRunner(parts, NoOptions()), blocks=blocks))

    @classmethod
    def largest(cls) -> int:
        """The largest bucket; `rows` if it has none."""
        try:
            buckets = cls().drive(warm=False).runner.buckets
        except pytest.skip.Exception:  # said by each check
            buckets = ()
        return max(buckets, default=cls.rows)


def sizes(suite: type[RunnerBase]) -> Iterator[int]:
    """Every batch size from 1 to one beyond the largest bucket."""
    yield from range(1, min(suite.largest() + 1, suite.rows) + 1)


def compare(found: HostSampled, expected: HostSampled, step: Step | None, what: str, rounding: float) -> None:
    """The same tokens for every request that gets one, and log-probabilities but for rounding. `step` None: for all."""
    counts = np.ones(len(expected.tokens), bool) if step is None else step.emits
    tokens, wanted = found.tokens[counts].tolist(), expected.tokens[counts].tolist()
    assert tokens == wanted, f"{what}: tokens are not those of eager steps: {tokens} instead of {wanted}"
    for name in ("logprobs", "top_ids", "top_logprobs"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), f"{what}: {name} are {'missing' if mine is None else 'not wanted'}"
        if theirs is not None and not np.allclose(mine[counts], theirs[counts], rtol=0, atol=rounding):
            raise AssertionError(f"{what}: {name} are not those of eager steps: {mine[counts]} not {theirs[counts]}")
    assert (found.scores is None) == (expected.scores is None), f"{what}: scores of the prompt are missing or unasked"
    if found.scores is not None and expected.scores is not None:
        compare(found.scores, expected.scores, None, f"{what}, scores of the prompt", rounding)


def describe(step: Step) -> str:
    """A step in words."""
    kind = "decode" if step.max_query_len == 1 else "prefill" if (step.query_lens > 1).all() else "mixed"
    fed = f", {len(step.feeds)} fed on the device" if len(step.feeds) else ""
    return f"{kind}, {step.num_requests} requests{fed}"
