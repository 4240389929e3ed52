"""One layer of attention, every installed one: decode, prefill, and a ragged mix of both.

All of them are timed in turns, after each was found right; `speed-up` is over vectorized-gather, within a round.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest
import torch

from nanofw.attention import Attention
from nanofw.build import resolve_device
from nanofw.errors import PluginError
from nanofw.measure.judged import judged
from nanofw.measure.replay import Replay
from nanofw.measure.rounds import Timed, interleaved
from nanofw.options import build_options
from nanofw.plugins import PluginHost
from nanofw.testing.attention_base import compare, run
from nanofw.testing.cases import Case, numbers
from nanofw.testing.layout import lay_out
from nanofw.testing.right import assert_right, ends

DEVICE = resolve_device("auto")
BASE = "vectorized-gather"
NAMES = [s.name for s in PluginHost.load().statuses() if s.kind == "attention" and s.status != "failed"]


def shapes() -> dict[str, Case]:
    """On a GPU the heads of Qwen3-0.6B in bfloat16; a small layer on a CPU."""
    draw = random.Random(0).randint
    if DEVICE.type == "cuda":
        layer = {"dtype": "bf16", "head_size": 128, "heads": 16, "kv_heads": 8}
        decode, prompt, longest, chunk = (64, 1024), (8, 1024), 4096, 512
    else:
        layer = {"dtype": "fp32", "head_size": 32, "heads": 4, "kv_heads": 2}
        decode, prompt, longest, chunk = (16, 256), (4, 128), 384, 64
    contexts = (longest, longest, *(draw(1, longest) for _ in range(decode[0] - 2)))  # the first two are in prefill
    return {
        "decode": Case(contexts=decode[1:] * decode[0], **layer),
        "prefill": Case(contexts=prompt[1:] * prompt[0], queries=prompt[1:] * prompt[0], **layer),
        "ragged": Case(contexts=contexts, queries=(chunk,) * 2 + (1,) * (decode[0] - 2), **layer),
    }


CASES = shapes()


@pytest.fixture(scope="module")
def timed(host: PluginHost, quick: bool) -> Callable[[str], dict[str, Timed | Exception]]:
    """By shape, times of every attention, or why it has none."""
    found: dict[str, dict[str, Timed | Exception]] = {}

    def measure(shape: str) -> dict[str, Timed | Exception]:
        if shape not in found:
            found[shape] = _measure(CASES[shape], host, rounds=3 if quick else 15)
        return found[shape]

    return measure


def _measure(case: Case, host: PluginHost, rounds: int) -> dict[str, Timed | Exception]:
    problem = lay_out(case, numbers(case, DEVICE))
    work, found = {}, {}
    for name in NAMES:
        try:
            attention = _right(host, name, case)
        except (PluginError, AssertionError) as error:
            found[name] = error
        else:
            batch = problem.batch.with_plan(attention.plan(problem.batch))
            work[name] = _forward(attention, problem, batch)
    with torch.inference_mode():
        return found | interleaved(work, DEVICE, rounds)


def _right(host: PluginHost, name: str, case: Case) -> Attention:
    """The attention for `case`, once it was right on small cases and on two requests of this one."""
    cls = host.get("attention", name).load()
    if reasons := cls.validate(case.spec(DEVICE)):
        raise PluginError(f"{name} does not serve {case}: {'; '.join(reasons)}")
    assert_right(cls, case.spec(DEVICE))
    attention = cls(case.spec(DEVICE), build_options(cls.Options, {}, name))
    part, dense = ends(case, numbers(case, DEVICE))
    laid_out = lay_out(part, dense)
    compare(laid_out, dense, run(attention, laid_out))
    return attention


def _forward(attention: Attention, problem, batch) -> Callable[[], torch.Tensor]:
    return lambda: attention.forward(problem.q, problem.k, problem.v, problem.kv, batch)


@pytest.mark.gate(speedup=0.25)
@pytest.mark.benchmark(group="attention")
@pytest.mark.parametrize("shape", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_attention(replay: Replay, timed, read_bandwidth: float, name: str, shape: str) -> None:
    """The plan is made once a step for all layers, so it is not in the time of one."""
    found, case = timed(shape), CASES[shape]
    mine, base = found[name], found[BASE]
    if isinstance(mine, PluginError):
        pytest.skip(str(mine))
    if isinstance(mine, AssertionError):
        pytest.fail(f"not timed, because it is wrong: {mine}", pytrace=False)
    replay(mine.wall, tokens=sum(case.query_lens), device_s=mine.device_s, calls=mine.calls)
    seconds = mine.device_s or statistics.median(mine.wall)
    if shape == "decode":
        size = sum(case.contexts) * case.kv_heads * case.head_size * 2 * (2 if case.dtype == "bf16" else 4)
        replay.benchmark.extra_info["bandwidth_share"] = size / seconds / read_bandwidth
    if isinstance(base, Timed):
        ratios = [b / m for b, m in zip(base.wall, mine.wall, strict=True)]
        judged(replay.benchmark, "gain", speedup=ratios)
