"""The story in one table: what each step from the naive gather to the fused model removes.

    python benchmarks/story.py --out DIR    on a GPU, Qwen3-0.6B shape; figures also go to DIR/story.json

Whole-engine milliseconds a decode step, as in `gpu.py`, prompts of 64 tokens. The slow steps generate fewer tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu import decode_ms, engine
from rich.console import Console
from rich.table import Table

BATCHES = (1, 2, 4, 8, 16)
PLAIN = {"impl": "transformers", "runner": "eager", "sampler": "default", "steps_in_flight": 0}
GRAPHS = PLAIN | {
    "attention": "triton-paged",
    "sampler": "triton",
    "runner": "cuda-graph",
    "steps_in_flight": 1,
}


@dataclass(frozen=True)
class Chapter:
    """One step of the story: what it changed, and how many tokens it takes to time it."""

    name: str
    removed: str
    settings: dict[str, Any] = field(default_factory=dict)
    tokens: int = 129


STORY = (
    Chapter(
        "naive-gather",
        "nothing yet: two small copies for every token of every context",
        PLAIN | {"attention": "naive-gather"},
        5,
    ),
    Chapter(
        "vectorized-gather", "the loop: one gather for the whole batch", PLAIN | {"attention": "vectorized-gather"}, 33
    ),
    Chapter("flash", "the scores in memory, and the five operations over them", PLAIN | {"attention": "flash"}, 33),
    Chapter("triton-paged", "the copy: K and V are read where they lie", PLAIN | {"attention": "triton-paged"}, 33),
    Chapter("+ cuda-graph", "Python: one launch a step, one step ahead", GRAPHS),
    Chapter("+ compile", "kernels between the projections", GRAPHS | {"compile": "inductor"}),
    Chapter("fused", "most other kernels, and the gaps between those that are left", {}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="a comma list of steps, by name", default=",".join(c.name for c in STORY))
    arguments = parser.parse_args()
    table = Table("step", *(f"B={batch}" for batch in BATCHES), "1 to 16", "what it removed", title="ms a decode step")
    found = {}
    for chapter in (c for c in STORY if c.name in arguments.only.split(",")):
        start = time.perf_counter()
        llm = engine(buckets=BATCHES, **chapter.settings)
        built = time.perf_counter()
        ms = {batch: decode_ms(llm, batch, prompt=64, rounds=3, tokens=chapter.tokens) for batch in BATCHES}
        found[chapter.name] = {"ms a step": ms, "removed": chapter.removed, "resolved": str(llm.engine.resolved)}
        speedup = 16 * ms[1] / ms[16]
        table.add_row(chapter.name, *(f"{ms[batch]:.2f}" for batch in BATCHES), f"{speedup:.1f}x", chapter.removed)
        took = f"built in {built - start:.0f} s, measured in {time.perf_counter() - built:.0f} s"
        print(f"{chapter.name}: {', '.join(f'{x:.3f}' for x in ms.values())} ms; {took}", flush=True)
        if arguments.out:
            (arguments.out / "story.json").write_text(json.dumps(found, indent=2))
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
