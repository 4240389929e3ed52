"""Everything that needs a GPU: first that it is right, then how fast it is.

    python benchmarks/gpu.py                          all sections, in order
    python benchmarks/gpu.py check decode --out DIR   some of them; figures also go to DIR/gpu.json

A wrong result ends the run before anything is timed. Decode figures are whole-engine ones: (time of 129 tokens - time
of 1) / 128 through `LLM.generate`, nothing left out, medians over rounds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanofw import LLM, SamplingParams
from nanofw.attention import AttentionSpec
from nanofw.batch import Batch, pack
from nanofw.kv_cache import KVCacheSpec
from nanofw.measure.machine import describe
from nanofw.plugins import PluginHost
from nanofw.request import Request
from nanofw.table import RequestTable
from nanofw.weights import resolve

MODEL = "dummy:qwen3-0.6b"
FAST = {"model_impl": "fused", "attention": "triton-paged", "runner": "cuda-graph", "sampler": "triton"}
BATCHES = (1, 8, 16, 64, 256)
FIRST_BAR = dict(zip(BATCHES, (0.62, 0.75, 0.88, 1.12, 2.35), strict=True))  # ms a step
AIM = dict(zip(BATCHES, (0.48, 0.57, 0.65, 0.85, 1.75), strict=True))
GREEDY = {"temperature": 0.0, "ignore_eos": True}

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

figures: dict[str, Any] = {}


@cache
def host() -> PluginHost:
    return PluginHost.load()


@cache
def source() -> Any:
    """The model's source. It draws the random weights once: that takes longer than any measurement here."""
    found = resolve(MODEL)
    drawn = cache(lambda: load("eager"))

    def load(attn_implementation: str) -> Any:
        return type(found).load_module(found, torch.float32, DEVICE, attn_implementation)

    def load_module(dtype: torch.dtype, device: torch.device, attn_implementation: str) -> Any:
        module = copy.deepcopy(drawn())
        module.set_attn_implementation(attn_implementation)
        return module.to(device=device, dtype=dtype)

    found.load_module = load_module
    return found


@cache
def model(impl: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return host().get("model", impl).load()(source(), dtype, DEVICE, options_of("model", impl, **options))


def options_of(kind: str, name: str, **given: Any) -> Any:
    return host().get(kind, name).load().Options(**given)


def engine(
    impl: str = "fused",
    buckets: Sequence[int] = BATCHES,
    contexts: Sequence[int] = (256,),
    compile: str = "",
    **settings: Any,
) -> LLM:
    settings = FAST | {"steps_in_flight": 1, "max_model_len": 2048, "kv_memory": "40GiB"} | settings
    if settings["runner"] == "cuda-graph":
        settings["options"] = {"runner": {"buckets": list(buckets), "contexts": list(contexts)}}
    loaded = model(impl, **({"compile": compile} if compile else {}))
    return LLM(MODEL, host=host(), source=source(), loaded=loaded, **settings)


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300, 150_000) for _ in range(length)] for _ in range(count)]


def logits(impl: str, attention: str, dtype: torch.dtype, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Logits `[B, V]` of a prefill of random prompts and of the decode step after it, the same tokens for all."""
    spec = model(impl, dtype).spec
    cache_cls = host().get("kv_cache", "paged").load()
    size = max(lengths) + 2
    blocks = 1 + len(lengths) * -(-size // 16)
    kv = cache_cls(KVCacheSpec(spec.layers, blocks, len(lengths), size, dtype, DEVICE), cache_cls.Options())
    attend = host().get("attention", attention).load()
    attend = attend(AttentionSpec(spec.layers, dtype, DEVICE, kv.block_size), attend.Options())
    table, rows = RequestTable(len(lengths), size), np.arange(len(lengths))
    for i, length in enumerate(lengths):
        ids = tuple(prompts(1, length + 1, seed=i)[0])
        table.open(Request(str(i), ids, SamplingParams(), 0, length + 2, "length", ()))
    found = []
    for query_lens in (np.array(lengths), np.ones(len(lengths), dtype=np.int64)):
        assert kv.allocate(rows, table.computed[rows] + query_lens)
        batch = Batch.from_step(pack(table, rows, query_lens, kv.block_table, kv.block_size), DEVICE)
        found.append(model(impl, dtype).forward(batch.with_plan(attend.plan(batch)), attend, kv.layers).float())
        table.computed[rows] += query_lens
    return found


def check() -> None:
    """Fused bf16 logits no further from float32 than plain bf16; tokens of small float32 models equal the reference."""
    worst = 0.0
    for lengths in ([7], [20, 1, 33], [5] * 8, [9] * 16, [11] * 17, [100, 3] * 32, [6] * 65, [4] * 256, [1500, 1, 700]):
        with torch.inference_mode():
            exact = logits("transformers", "triton-paged", torch.float32, lengths)
            plain = logits("transformers", "vectorized-gather", torch.bfloat16, lengths)
            fused = logits("fused", "triton-paged", torch.bfloat16, lengths)
        for what, e, p, f in zip(("prefill", "decode"), exact, plain, fused, strict=True):
            allowed, error = ((x - e).norm().item() / e.norm().item() for x in (p, f))
            print(f"  B={len(lengths):<4} longest {max(lengths):<5} {what:8} plain {allowed:.4f} fused {error:.4f}")
            assert error < 1.2 * allowed + 0.005, "the fused model is wrong"
            worst = max(worst, error)
    figures["check"] = {"worst relative error of bf16 logits": worst}
    for name in ("dummy:tiny", "dummy:llama-tiny", "dummy:smollm2-tiny"):
        work = [[1, 2, 3], list(range(40)), [9] * 17, [7, 8], list(range(50, 120))]
        params = SamplingParams(max_tokens=24, **GREEDY)
        common: dict[str, Any] = {"dtype": "float32", "kv_blocks": 128, "max_num_seqs": 5, "host": host()}
        expected = tokens(LLM(name, attention="vectorized-gather", **common), work, params)
        for depth in (0, 1):
            got = tokens(LLM(name, **common, **FAST, steps_in_flight=depth), work, params)
            assert got == expected, f"{name}, depth {depth}: {got} instead of {expected}"
        print(f"  {name}: fused, triton-paged, cuda-graph give the tokens of transformers in float32")


def tokens(llm: LLM, work: Any, params: SamplingParams) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(work, params)]


def agree() -> None:
    """Greedy tokens of the fast path in bfloat16 against transformers in bfloat16: they part at near-ties only.

    Rounding differs, so two tokens that are almost equally likely may change places (transformers#25921). At the first
    difference each one's choice is among the other's five likeliest, and not far behind the first of them.
    """
    work, params = [*prompts(12, 40), *prompts(4, 300, seed=1)], SamplingParams(max_tokens=48, logprobs=5, **GREEDY)
    plain = {"attention": "vectorized-gather", "runner": "eager", "sampler": "default", "steps_in_flight": 0}
    expected, got = (llm.generate(work, params) for llm in (engine("transformers", **plain), engine()))
    parted, widest = 0, 0.0
    for one, other in zip(expected, got, strict=True):
        a, b = one.outputs[0], other.outputs[0]
        first = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y), None)
        if first is None:
            continue
        parted += 1
        for mine, theirs in ((a, b), (b, a)):
            likeliest = dict(mine.logprobs[first].top)
            assert theirs.token_ids[first] in likeliest, f"token {first}: {theirs.token_ids[first]} not in {likeliest}"
            widest = max(widest, mine.logprobs[first].logprob - likeliest[theirs.token_ids[first]])
    print(f"  {parted} of {len(work)} requests part within 48 tokens, at margins of at most {widest:.3f} nats")
    figures["bf16 tokens"] = {"requests": len(work), "parted": parted, "widest margin, nats": widest}
    assert widest < 0.25, "more than a near-tie"


def decode_ms(llm: LLM, batch: int, prompt: int = 10, rounds: int = 5, tokens: int = 129) -> float:
    """Median milliseconds of a decode step: (time of `tokens` - time of 1) / (tokens - 1)."""

    def seconds(count: int) -> float:
        work = prompts(batch, prompt)
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(work, SamplingParams(max_tokens=count, **GREEDY))
        return time.perf_counter() - start

    for count in (min(tokens, 9), 1):
        seconds(count)
    return statistics.median((seconds(tokens) - seconds(1)) / (tokens - 1) * 1e3 for _ in range(rounds))


def decode() -> None:
    """Milliseconds a step over batch sizes, against the bars."""
    llm = engine()
    print(f"  {llm.engine.resolved['runner'].path}")
    found = {}
    for batch in BATCHES:
        found[batch] = ms = decode_ms(llm, batch)
        bars = f"first bar {FIRST_BAR[batch]:.2f}   aim {AIM[batch]:.2f}"
        print(f"  B={batch:<4} {ms:.3f} ms/step   {bars}   {batch / ms * 1e3:,.0f} tok/s")
    figures["decode ms/step"] = found
    assert not llm.engine.runner.report.fallbacks, llm.engine.runner.report.fallbacks


def profile() -> None:
    """How long the GPU is idle between steps, by events around each graph; then, traced, the time of each kernel.

    The profiler slows the launch of a graph, so the idle share is not taken from its trace.
    """
    from torch.profiler import ProfilerActivity

    llm = engine()
    runner: Any = llm.engine.runner
    for batch in BATCHES:
        work, params = prompts(batch, 10), SamplingParams(max_tokens=200, **GREEDY)
        llm.generate(work, params)
        for number, prompt in enumerate(work):
            llm.engine.add(str(number), prompt, params, stream=False)
        for _ in range(20):
            llm.engine.step()
        plain, marks = runner._captured, []
        runner._captured = {key: replace(graph, replay=timed(graph.replay, marks)) for key, graph in plain.items()}
        for _ in range(100):
            llm.engine.step()
        torch.cuda.synchronize()
        runner._captured = plain
        idle = sum(before.elapsed_time(start) for (_, before), (start, _) in itertools.pairwise(marks))
        share = idle / marks[0][0].elapsed_time(marks[-1][1])
        figures.setdefault("idle share between steps", {})[batch] = share
        print(f"  B={batch}: idle between steps, copies counted as idle: {share:.1%} (aim 3 %)")
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(20):
                llm.engine.step()
            torch.cuda.synchronize()
        for _ in llm.engine.run():
            pass
        events = sorted(
            (e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.device_type.name == "CUDA"
        )
        report(batch, events)


def timed(replay: Callable[[], None], marks: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> Callable[[], None]:
    """A replay between two events, which are added to `marks`."""

    def run() -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        marks.append((start, end))

    return run


def report(batch: int, events: list[tuple[float, float, str]]) -> None:
    """Print kernels by name, and the share of time in which none runs, all of it."""
    by_name: dict[str, list[float]] = {}
    busy_until, idle = events[0][0], 0.0
    for start, end, name in events:
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
        by_name.setdefault(name[:60], []).append(end - start)
    span = busy_until - events[0][0]
    print(f"  B={batch}: {span / 20 / 1e3:.3f} ms a step as traced, no kernel in {idle / span:.1%}")
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:14]:
        shown = f"{sum(times) / 20:8.1f} us a step  {len(times) / 20:6.1f} launches  {statistics.median(times):6.2f} us"
        print(f"    {shown}  {name}")


def scaling() -> None:
    """Throughput at 16 over that at 1, prompts of 128 tokens."""
    llm = engine(buckets=(1, 16))
    ms = {batch: decode_ms(llm, batch, prompt=128, rounds=3) for batch in (1, 16)}
    figures["speed-up of 16 over 1, context 128"] = 16 * ms[1] / ms[16]
    print(f"  {ms[1]:.3f} and {ms[16]:.3f} ms/step: {16 * ms[1] / ms[16]:.1f}x (aim 11x)")


def mixed() -> None:
    """256 requests, prompts and outputs of 100 to 1,024 tokens (seed 0), temperature 0.6."""
    llm = engine(buckets=(1, 4, *range(8, 257, 8)), contexts=(1024,), max_batch_tokens=8192)
    rng = random.Random(0)
    work = [prompts(1, rng.randint(100, 1024), seed=i)[0] for i in range(256)]
    params = [SamplingParams(max_tokens=rng.randint(100, 1024), temperature=0.6, ignore_eos=True) for _ in work]
    llm.generate(work, params)
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        made = sum(len(o.outputs[0].token_ids) for o in llm.generate(work, params))
        rates.append(made / (time.perf_counter() - start))
    figures["mixed load tok/s"] = statistics.median(rates)
    print(f"  {statistics.median(rates):,.0f} output tok/s (first bar 25,000, aim 32,000; {llm.engine.runner.report})")


def prefill() -> None:
    """16 prompts of 1,024 tokens in one step: share of the matmul ceiling."""
    llm = engine(runner="eager", max_batch_tokens=16_384, steps_in_flight=0)
    work, params = prompts(16, 1024), SamplingParams(max_tokens=1, **GREEDY)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(work, params)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[1:])
    spec = model("fused").spec
    layers = model("fused").weights.layers
    parameters = sum(w.numel() for layer in layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    flops = 2 * parameters * 16_384 + len(spec.layers) * 4 * 16 * 128 * 16 * 1024 * 1025 / 2
    share = flops / seconds / 790e12
    figures["prefill of 16,384 tokens"] = {"ms": seconds * 1e3, "share of the matmul ceiling": share}
    print(f"  {seconds * 1e3:.1f} ms, {16_384 / seconds:,.0f} tok/s, {share:.0%} of the matmul ceiling (aim 40 %)")


SECTIONS: dict[str, Callable[[], None]] = {
    "check": check,
    "agree": agree,
    "decode": decode,
    "profile": profile,
    "scaling": scaling,
    "mixed": mixed,
    "prefill": prefill,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures["machine"] = describe()
    for name in arguments.sections or SECTIONS:
        start = time.perf_counter()
        print(f"{name}:", flush=True)
        SECTIONS[name]()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
        if arguments.out:
            (arguments.out / "gpu.json").write_text(json.dumps(figures, indent=2, default=str))


if __name__ == "__main__":
    main()
