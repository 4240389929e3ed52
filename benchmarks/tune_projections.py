"""Time every shape of the fused model's projections on this GPU, to fill the table in `nanofw_fused/routes.py`.

    python benchmarks/tune_projections.py [--rows 1,8,16,32,64,128,256]

Each candidate runs over the weights of 28 layers, chained in one CUDA graph as they are in a step, so nothing comes
from the L2 cache and dependent launch overlaps as it will.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanofw.pdl import available
from nanofw_fused.project import Projector
from nanofw_fused.routes import CUBLAS, Tile

SHAPES = {
    "qkv": (1024, 4096),
    "o": (2048, 1024),
    "gate_up": (1024, 3072),
    "down": (3072, 1024),
    "head": (1024, 151_936),
}
"""K and N of Qwen3-0.6B; gate_up computes N gated outputs from 2 N rows."""
LAYERS = 28


def candidates(projection: str, rows: int) -> Iterator[Tile]:
    """Shapes worth a try."""
    head = projection == "head"
    if rows <= 16:
        for bn, warps, bk in itertools.product((16, 32), (2, 4, 8), (64, 128, 256)):
            if bn * SHAPES[projection][0] <= 64 * 1024 and bk * warps <= SHAPES[projection][0]:
                yield Tile("slab", bn=bn, warps=warps, bk=bk)
    if head:
        for bn, bk, stages in itertools.product((32, 64, 128), (64, 128, 256), (3, 4, 6)):
            if bn * bk * stages <= 80 * 1024:
                yield Tile("tiled", bn=bn, warps=4, bk=bk, stages=stages)
    elif rows > 8:
        for bn, bk, stages in itertools.product((16, 32, 64, 128), (64, 128), (3, 4, 6)):
            for splits in (1, 2, 4, 8) if projection in ("o", "down") else (1,):
                if bn * bk * stages <= 64 * 1024 and SHAPES[projection][0] // splits >= bk * 2:
                    yield Tile("tiled", bn=bn, warps=4 if bn <= 64 else 8, bk=bk, stages=stages, splits=splits)
    yield CUBLAS


def runner(projection: str, rows: int, tile: Tile, layers: int) -> Callable[[], None]:
    """A function that runs the projection once for each layer."""
    k, n = SHAPES[projection]
    device, gated = torch.device("cuda"), projection == "gate_up"
    x = torch.randn(rows, k, device=device).bfloat16()
    residual = torch.randn(rows, n, device=device).bfloat16()
    weights = [torch.randn(n * (1 + gated), k, device=device).bfloat16() * k**-0.5 for _ in range(layers)]
    project = Projector(torch.bfloat16, available(device))
    norm = projection in ("qkv", "gate_up", "head")
    out: Any = torch.empty(rows, n * (1 + gated), device=device, dtype=torch.bfloat16)

    def run() -> None:
        for w in weights:
            if tile.route == "slab":
                project.slab(x, w, tile, eps=1e-6 if norm else None, residual=None if norm else residual, gated=gated)
            elif tile.route == "tiled":
                project.tiled(x, w, tile, gated=gated)
            else:
                torch.mm(x, w.t(), out=out)
                if gated:
                    project.gate(out)

    return run


def compile_one(job: tuple[str, int, Tile]) -> None:
    """Fill Triton's cache on disk."""
    try:
        runner(*job, layers=1)()
        torch.cuda.synchronize()
    except Exception as error:  # the timing run reports it
        print(job, str(error).splitlines()[0])


def microseconds(projection: str, rows: int, tile: Tile) -> float:
    """Median of one projection, chained."""
    layers = 4 if projection == "head" else LAYERS
    run = runner(projection, rows, tile, layers)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(12):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / layers)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1,8,16,64")
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    all_rows = [int(rows) for rows in arguments.rows.split(",")]
    jobs = [(p, rows, tile) for rows in all_rows for p in SHAPES for tile in candidates(p, rows)]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    for rows, projection in itertools.product(all_rows, SHAPES):
        k, n = SHAPES[projection]
        found = []
        for tile in candidates(projection, rows):
            try:
                found.append((microseconds(projection, rows, tile), tile))
            except Exception as error:  # too much shared memory, for one
                print(f"{projection} {rows} {tile}: {str(error).splitlines()[0][:100]}")
        found.sort(key=lambda pair: pair[0])
        floor = k * n * (2 + 2 * (projection == "gate_up")) / 4.48e6
        print(f"{projection} at {rows} rows, floor {floor:.2f} us:")
        for us, tile in [*found[:4], *(f for f in found[4:] if f[1].route == "cublas")]:
            print(f"    {us:7.2f} us  {tile}", flush=True)


if __name__ == "__main__":
    main()
