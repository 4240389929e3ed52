"""The batch-scaling experiment: the same work at several batch sizes, on one engine or several, in shuffled rounds.

A machine drifts: it heats up, other programs come and go. So every round visits every engine at every batch size once,
in an order that is shuffled anew (from a seed), and ratios are taken between measurements of one round.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanofw.errors import RequestError
from nanofw.request import Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from nanofw.engine import Engine

WARM_UP_TOKENS = 4
WATCH_EVERY_S = 0.5
"""A run is looked in on twice a second, so one that is shorter is not disturbed at all."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What each run does: greedy, to the last token whatever is generated.

    Attributes:
        prompts: token ids; a batch of n takes the first n, starting over where there are fewer.
        output_tokens: new tokens a request, at least 2: the first ends the prefill, the others are the decode.
    """

    prompts: Sequence[Sequence[int]]
    output_tokens: int

    def __post_init__(self) -> None:
        """Raises: RequestError if there is nothing to measure."""
        if not self.prompts:
            raise RequestError("a sweep needs at least one prompt")
        if self.output_tokens < 2:
            raise RequestError(f"output_tokens must be at least 2 (the decode needs one), got {self.output_tokens}")

    @classmethod
    def random(cls, batch: int, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: int = 0) -> Workload:
        """A different prompt of random ids for each of `batch` requests, so that no two share a prefix."""
        if prompt_tokens < 1:
            raise RequestError(f"prompt_tokens must be at least 1, got {prompt_tokens}")
        generator = random.Random(seed)
        prompts = [[generator.randrange(vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
        return cls(prompts, output_tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement.

    Attributes:
        tokens: generated, all requests together. prompt_tokens: of all requests.
        cached_tokens: prompt tokens that were not computed, because the KV cache held them.
        total_s: from the first request added to the last token.
        prefill_s: until every request had its first token.
        decode_tokens, decode_steps: what came after that, and in how many steps.
    """

    batch: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    total_s: float
    prefill_s: float
    decode_tokens: int
    decode_steps: int

    @property
    def tok_s(self) -> float:
        """Generated tokens a second, prefill included: what a user gets."""
        return self.tokens / self.total_s

    @property
    def decode_tok_s(self) -> float:
        """Generated tokens a second once all requests decode."""
        return self.decode_tokens / (self.total_s - self.prefill_s)

    @property
    def decode_ms(self) -> float:
        """Milliseconds a decode step."""
        return 1000 * (self.total_s - self.prefill_s) / self.decode_steps

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens computed a second."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a sweep stands.

    Attributes:
        engine: name of the engine at work. round: from 1; 0 is the warm-up.
        done, total: runs finished, and all there will be, the warm-up's included.
        prefill_tok_s, decode_tok_s: of the run at work, once they are known.
    """

    engine: str
    batch: int
    round: int
    done: int
    total: int
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None


def run_batch(
    engine: Engine, workload: Workload, batch: int, watch: Callable[[float, float | None], None] | None = None
) -> Run:
    """Run `batch` requests together and measure. Results have been waited for, so a GPU is done when the clock stops.

    Args:
        engine: idle.
        workload: the requests.
        batch: how many of them.
        watch: told prefill and decode tokens a second so far, twice a second, once the prefill is over.

    Raises:
        RequestError: the engine refuses a request, or one ends before its last token (the reason is named).
    """
    params = SamplingParams(temperature=0, max_tokens=workload.output_tokens, ignore_eos=True)
    prompts = [workload.prompts[i % len(workload.prompts)] for i in range(batch)]
    prompt_tokens = sum(map(len, prompts))
    finished: list[RequestOutput] = []
    prefill_s, steps, decode_from, look_at = 0.0, 0, 0, WATCH_EVERY_S
    gc.collect()
    start = time.perf_counter()
    # Text is not asked for (stream=False), so none is paid for.
    requests = [engine.add(f"run-{i}", ids, params, stream=False) for i, ids in enumerate(prompts)]
    while engine.has_work:
        finished += engine.step()
        steps += bool(prefill_s)
        if not prefill_s and all(_generated(engine, r) for r in requests):
            prefill_s = time.perf_counter() - start
            decode_from = sum(_generated(engine, r) for r in requests)
        elif watch and prefill_s and (now := time.perf_counter() - start) > look_at:
            look_at = now + WATCH_EVERY_S
            decoded = sum(_generated(engine, r) for r in requests) - decode_from
            watch(prompt_tokens / prefill_s, decoded / (now - prefill_s))
    total_s = time.perf_counter() - start

    tokens = sum(len(o.outputs[0].token_ids) for o in finished)
    if early := [o for o in finished if len(o.outputs[0].token_ids) < workload.output_tokens]:
        reason = early[0].outputs[0].finish_reason
        raise RequestError(
            f"{len(early)} of {batch} requests ended early ({reason}): {len(prompts[0])} prompt and "
            f"{workload.output_tokens} output tokens need a larger max_model_len or KV cache"
        )
    return Run(
        batch=batch,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(o.cached_tokens for o in finished),
        preemptions=sum(o.preemptions for o in finished),
        total_s=total_s,
        prefill_s=prefill_s,
        decode_tokens=tokens - decode_from,
        decode_steps=steps,
    )


def sweep(
    engines: Mapping[str, Engine],
    workload: Workload,
    batch_sizes: Sequence[int],
    rounds: int = 3,
    seed: int = 0,
    watch: Callable[[Progress], None] | None = None,
) -> dict[tuple[str, int], list[Run]]:
    """Measure every engine at every batch size.

    Args:
        engines: by name; idle, and free to share a model.
        workload: what each run does.
        batch_sizes: distinct, at least 1.
        rounds: measurements of each point.
        seed: of the order.
        watch: told before each run, and during those that take longer than half a second.

    Returns:
        For each (engine, batch size) its runs, one a round, in the order of the rounds. The warm-up, a few tokens at
        each point, is not among them.

    Raises:
        RequestError: see `run_batch`; or there is nothing to measure.
    """
    if not batch_sizes or min(batch_sizes) < 1 or len(set(batch_sizes)) < len(batch_sizes):
        raise RequestError(f"batch sizes must be distinct and at least 1, got {list(batch_sizes)}")
    if rounds < 1:
        raise RequestError(f"rounds must be at least 1, got {rounds}")
    points = [(name, batch) for name in engines for batch in batch_sizes]
    total, done = len(points) * (rounds + 1), 0
    runs: dict[tuple[str, int], list[Run]] = {point: [] for point in points}
    warm_up = Workload(workload.prompts, min(WARM_UP_TOKENS, workload.output_tokens))
    shuffle = random.Random(seed).shuffle
    gc.collect()
    gc.freeze()  # what is there now need not be looked through before each run
    try:
        for number in range(rounds + 1):
            order = list(points)
            shuffle(order)
            for name, batch in order:
                inside = _inside(watch, Progress(name, batch, number, done, total))
                run = run_batch(engines[name], workload if number else warm_up, batch, inside)
                if number:
                    runs[name, batch].append(run)
                done += 1
    finally:
        gc.unfreeze()
    if watch:
        watch(Progress(name, batch, rounds, done, total, run.prefill_tok_s, run.decode_tok_s))
    return runs


def _inside(
    watch: Callable[[Progress], None] | None, progress: Progress
) -> Callable[[float, float | None], None] | None:
    if watch is None:
        return None
    watch(progress)

    def tell(prefill_tok_s: float, decode_tok_s: float | None) -> None:
        p = progress
        watch(Progress(p.engine, p.batch, p.round, p.done, p.total, prefill_tok_s, decode_tok_s))

    return tell


def _generated(engine: Engine, request: Request) -> int:
    """Tokens of `request` whose values are known, wherever it is in its life."""
    if request.row < 0:
        return len(request.output_ids)
    return int(engine.table.known[request.row]) - len(request.prompt_ids)
