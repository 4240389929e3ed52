"""Time launch shapes of decode attention on this GPU, to fill `decode_shape` in `nanofw_triton/plan.py`.

    python benchmarks/tune_attention.py [--cases 1x100,256x100,256x100-2000]

A range is a batch of contexts of all lengths in it, as a server holds them. Geometry of Qwen3-0.6B. Each candidate runs
over the caches of 28 layers, chained in one CUDA graph as in a step.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from nanofw.attention import AttentionSpec, Prologue
from nanofw.batch import Batch
from nanofw.kv_cache import LayerKV, LayerSpec
from nanofw_triton.attention import TritonPagedAttention
from nanofw_triton.plan import DecodeShape, longest_first, make_workspace

LAYER = LayerSpec(16, 8, 128, 128**-0.5)
BLOCK_SIZE = 16
LAYERS = 28
BYTES_A_TOKEN = 2 * 8 * 128 * 2


def candidates(batch: int, shortest: int, longest: int) -> Iterator[DecodeShape]:
    """Shapes worth a try."""
    if shortest < longest:
        for (tile, warps), stages, split in itertools.product(((32, 1), (32, 2), (64, 2)), (2, 3), (1, 2, 4, 8)):
            yield DecodeShape(tile, warps, stages, split)
        return
    splits = [s for s in (1, 2, 4, 8, 16, 32) if s == 1 or (batch * 8 * s <= 132 * 8 and longest // s >= 64)]
    shapes = ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4), (128, 8))
    for (tile, warps), stages, split in itertools.product(shapes, (1, 2, 3), splits):
        if stages == 1 or longest // split > tile:
            yield DecodeShape(tile, warps, stages, split)


class Chain:
    """Decode attention of one batch over the caches of some layers."""

    def __init__(self, batch: int, shortest: int, longest: int, layers: int) -> None:
        device = torch.device("cuda")
        lengths = np.linspace(shortest, longest, batch).round().astype(np.int64)
        np.random.default_rng(0).shuffle(lengths)
        self.tokens = int(lengths.sum())
        blocks = -(-longest // BLOCK_SIZE)
        columns = -(-(blocks + 1) // 16) * 16
        table = torch.zeros(batch, columns, dtype=torch.int32, device=device)
        table[:, :blocks] = 1 + torch.randperm(batch * blocks, device=device).view(batch, blocks)
        shape = (batch * blocks + 1, BLOCK_SIZE, 8, 128)
        self.caches = [
            LayerKV(i, LAYER, *(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in "kv"), BLOCK_SIZE)
            for i in range(layers)
        ]
        self.spec = AttentionSpec((LAYER,) * layers, torch.bfloat16, device, BLOCK_SIZE)
        self.attention = TritonPagedAttention(self.spec, TritonPagedAttention.Options())
        at = torch.from_numpy(lengths).to(device) - 1
        last = table.gather(1, (at // BLOCK_SIZE)[:, None])[:, 0].long() * BLOCK_SIZE + at % BLOCK_SIZE
        batch_ = Batch(
            token_ids=torch.zeros(batch, dtype=torch.int64, device=device),
            positions=at,
            slot_mapping=last,
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device),
            seq_lens=(at + 1).int(),
            block_table=table,
            logits_indices=torch.arange(batch, device=device),
            max_query_len=1,
            max_seq_len=longest,
            query_lens_host=np.ones(batch, dtype=np.int64),
            seq_lens_host=lengths,
        )
        self.batch = batch_.with_plan(self.attention.plan(batch_))
        self.qkv = torch.randn(batch, 32 * 128, device=device).bfloat16()
        angle = torch.rand(8192, 128, device=device)
        norm = torch.ones(128, device=device, dtype=torch.bfloat16)
        self.prologue = Prologue(angle.cos(), angle.sin(), norm, norm, 1e-6)

    def run(self, shape: DecodeShape, sort: bool = False) -> torch.Tensor:
        """Every layer once; if told so, the longest contexts first."""
        workspace = make_workspace(self.spec, shape.splits, self.batch.num_requests)
        requests = longest_first(self.batch.seq_lens) if sort else None
        batch = self.batch.with_plan(replace(self.batch.plan, shape=shape, workspace=workspace, requests=requests))
        for cache in self.caches:
            out = self.attention.forward_packed(self.qkv, self.prologue, cache, batch)
        return out

    def microseconds(self, shape: DecodeShape, sort: bool = False) -> float:
        """Median of one layer."""
        self.run(shape, sort)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(shape, sort)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(12):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / LAYERS)
        return statistics.median(times[2:])


def compile_one(shape: DecodeShape) -> None:
    """Fill Triton's cache on disk. Batch and context are no constants of the kernel."""
    try:
        chain = Chain(16, 100, 100, 1)
        for sort in (False, True):
            chain.run(shape, sort)
        torch.cuda.synchronize()
    except Exception as error:  # the timing run reports it
        print(shape, str(error).splitlines()[0][:100])


def read(case: str) -> tuple[int, int, int]:
    """`16x100` or `16x100-2000`: batch, shortest and longest context."""
    batch, contexts = case.split("x")
    shortest, _, longest = contexts.partition("-")
    return int(batch), int(shortest), int(longest or shortest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--cases",
        default="1x100,8x100,16x100,64x100,256x100,1x1000,16x1000,64x1000,256x1000,64x4096,"
        "256x100-2000,128x100-2000,64x100-2000",
    )
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    cases = [read(case) for case in arguments.cases.split(",")]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.map(compile_one, sorted({s for case in cases for s in candidates(*case)}, key=str), chunksize=1)
    for case in cases:
        chain, found = Chain(*case, LAYERS), []
        ragged = case[1] < case[2]
        for shape, sort in itertools.product(candidates(*case), (False, True) if ragged else (False,)):
            try:
                found.append((chain.microseconds(shape, sort), shape, "longest first" if sort else ""))
            except Exception as error:  # too much shared memory, for one
                print(f"{shape}: {str(error).splitlines()[0][:100]}")
        found.sort(key=lambda pair: pair[0])
        floor, today = chain.tokens * BYTES_A_TOKEN / 4.48e6, chain.batch.plan.shape
        print(f"B={case[0]} contexts {case[1]} to {case[2]}, floor {floor:.2f} us; today {today}:")
        for us, shape, order in found[:6] + [row for row in found[6:] if row[1] == today]:
            print(f"    {us:8.2f} us  {shape} {order}", flush=True)
        del chain


if __name__ == "__main__":
    main()
