"""The same work through nanofw, `transformers` generate and vLLM, each in a process of its own, one after another.

    python benchmarks/peers.py                                       on a GPU: Qwen3-0.6B shape, bfloat16
    python benchmarks/peers.py --model dummy:tiny --batches 1,4      anywhere
    python benchmarks/peers.py --json peers.json

Greedy, to the last token whatever is generated, the same random prompts and a config of the same shape; weights are
random, so texts differ and only times are compared. Milliseconds a decode step are (time of N tokens - time of 1) /
(N - 1), medians over rounds. vLLM is no dependency: where it is not installed, the table says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], Any]
"""Runs prompts to a number of new tokens each, and returns when they are there."""


def nanofw(model: str, longest: int, batch: int, on_gpu: bool) -> Generate:
    from nanofw import LLM, SamplingParams

    fast: dict[str, Any] = {
        "model_impl": "fused",
        "attention": "triton-paged",
        "runner": "cuda-graph",
        "sampler": "triton",
        "steps_in_flight": 1,
        "options": {"runner": {"contexts": [256], "buckets": sorted({1, 2, 4, 8, 16, batch})}},
    }
    plain: dict[str, Any] = {"attention": "vectorized-gather"}
    llm = LLM(model, **(fast if on_gpu else plain), max_model_len=longest, max_num_seqs=batch)

    def generate(prompts: list[list[int]], count: int) -> Any:
        return llm.generate(prompts, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))

    return generate


def transformers(model: str, longest: int, batch: int, on_gpu: bool) -> Generate:
    import torch

    from nanofw.weights import resolve

    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    module: Any = resolve(model).load_module(dtype, torch.device(device), "sdpa")

    @torch.inference_mode()
    def generate(prompts: list[list[int]], count: int) -> Any:
        ids = torch.tensor(prompts, device=device)
        new = {"max_new_tokens": count, "min_new_tokens": count}
        out = module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **new)
        return out.cpu()

    return generate


def vllm(model: str, longest: int, batch: int, on_gpu: bool) -> Generate:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    from nanofw.weights import resolve

    folder = tempfile.mkdtemp()
    config = resolve(model).config
    config.save_pretrained(folder)
    limits = {"max_model_len": longest, "max_num_seqs": batch}
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, **limits)

    def generate(prompts: list[list[int]], count: int) -> Any:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


PEERS: dict[str, Callable[..., Generate]] = {"nanofw": nanofw, "transformers": transformers, "vllm": vllm}


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """In the peer's own process: milliseconds a step and tokens a second by batch size, results waited for."""
    from importlib.metadata import version

    import torch

    on_gpu = torch.cuda.is_available()
    longest = arguments.prompt + arguments.tokens + 1
    generate = PEERS[name](arguments.model, longest, max(arguments.batches), on_gpu)
    rng, found = random.Random(0), {}
    for batch in arguments.batches:
        prompts = [[rng.randrange(3, 250) for _ in range(arguments.prompt)] for _ in range(batch)]

        def seconds(count: int, prompts: list[list[int]] = prompts) -> float:
            start = time.perf_counter()
            generate(prompts, count)
            return time.perf_counter() - start

        seconds(arguments.tokens)
        seconds(1)
        pairs = [(seconds(arguments.tokens), seconds(1)) for _ in range(arguments.rounds)]
        ms = statistics.median((whole - one) / (arguments.tokens - 1) * 1e3 for whole, one in pairs)
        total = statistics.median(whole for whole, _ in pairs)
        found[batch] = {"ms a step": ms, "tok/s": batch * arguments.tokens / total}
    return {"version": version(name), "torch": torch.__version__, "by batch": found}


def in_a_process(name: str) -> dict[str, Any]:
    """A peer's results, or why there are none."""
    if importlib.util.find_spec(name) is None:
        return {"absent": f"{name} is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--only", name, "--json", str(out)], check=False
        )
        if done.returncode:
            return {"absent": f"{name} failed with exit status {done.returncode} (its output is above)"}
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def main() -> None:
    import torch

    shape = "dummy:qwen3-0.6b" if torch.cuda.is_available() else "dummy:tiny"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=shape)
    parser.add_argument("--batches", default=[1, 4, 16], type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--prompt", default=10, type=int, help="tokens of each prompt")
    parser.add_argument("--tokens", default=129, type=int, help="new tokens a request, at least 2")
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=PEERS, help="this one, in this process")
    arguments = parser.parse_args()
    if arguments.tokens < 2 or min(arguments.batches) < 1:
        parser.error("--tokens must be at least 2, and batches at least 1")
    if arguments.only:
        found = measure(arguments.only, arguments)
    else:
        found = {name: in_a_process(name) for name in PEERS}
        show(found, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print milliseconds a step, and how many times as long as nanofw."""
    from rich.console import Console
    from rich.table import Table

    columns = [f"B={batch}" for batch in arguments.batches]
    title = f"ms a decode step, {arguments.model}, {arguments.prompt} + {arguments.tokens} tokens"
    table = Table("peer", "version", *columns, *(f"of nanofw, {c}" for c in columns), title=title)
    ours = found["nanofw"].get("by batch", {})
    for name, peer in found.items():
        if "absent" in peer:
            table.add_row(name, peer["absent"])
            continue
        ms = {batch: row["ms a step"] for batch, row in peer["by batch"].items()}
        ratios = [f"{ms[b] / ours[b]['ms a step']:.2f}x" if b in ours else "" for b in ms]
        table.add_row(name, peer["version"], *(f"{x:.3f}" for x in ms.values()), *ratios)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
