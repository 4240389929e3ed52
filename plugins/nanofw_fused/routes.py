"""Which kernel computes which projection, by batch: the one table, measured by `benchmarks/tune_projections.py`.

slab    weights asked for before the inputs are ready; norm, residual and SiLU inside        (kernels/slab.py)
tiled   pipelined tiles, K split in `splits`                                                  (kernels/tiled.py)
cublas  the library's product, with small kernels around it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Route = Literal["slab", "tiled", "cublas"]
Projection = Literal["qkv", "o", "gate_up", "down", "head"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A route with its shape.

    Attributes:
        route: the kernel. bn: output features a program. warps: of a program; for a slab also the slices of K.
        splits: parts of K, each with its own program (tiled).
        bk: elements of K a loop turn (tiled), or a slice and chunk (slab). stages: loop turns in flight (tiled).
    """

    route: Route
    bn: int = 16
    warps: int = 8
    splits: int = 1
    bk: int = 128
    stages: int = 4


CUBLAS = Tile("cublas")

HEAD = Tile("tiled", bn=64, warps=4, bk=128, stages=4)

ROUTES: tuple[tuple[int, dict[Projection, Tile]], ...] = (
    (
        8,
        {
            "qkv": Tile("slab", bn=32, warps=4, bk=256),
            "o": Tile("slab", bn=16, warps=4, bk=256),
            "gate_up": Tile("slab", bn=16, warps=2, bk=128),
            "down": Tile("slab", bn=16, warps=4, bk=256),
            "head": HEAD,
        },
    ),
    (
        16,
        {
            "qkv": Tile("slab", bn=32, warps=2, bk=256),
            "o": Tile("slab", bn=16, warps=4, bk=256),
            "gate_up": Tile("slab", bn=16, warps=2, bk=128),
            "down": Tile("slab", bn=16, warps=4, bk=256),
            "head": HEAD,
        },
    ),
    (
        64,
        {
            "qkv": Tile("tiled", bn=32, warps=4, stages=6),
            "o": Tile("tiled", bn=32, warps=4, stages=6, splits=4),
            "gate_up": Tile("tiled", bn=32, warps=4, stages=4),
            "down": Tile("tiled", bn=32, warps=4, stages=6, splits=4),
            "head": HEAD,
        },
    ),
    (1 << 62, {"qkv": CUBLAS, "o": CUBLAS, "gate_up": CUBLAS, "down": CUBLAS, "head": CUBLAS}),
)
"""Largest batch (tokens in the step) of a row, and its routes.

Measured on an H200 by `benchmarks/tune_projections.py`, us a projection in a chain (floor: weights at 4.48 TB/s):

    rows          1 slab   8 slab   16 slab   64 tiled   64 cublas   floor
    qkv             3.4      3.7       4.8        4.4         5.4      1.9
    o               2.5      3.0                  3.3         6.0      0.9
    gate_up         4.1      4.2       5.8        5.9         7.3      2.8
    down            3.2      3.6       4.1        3.8         7.0      1.4
    head (tiled)   73.2     75.7      77.4       84.9        87.7     69.5
"""


def routes_for(tokens: int) -> dict[Projection, Tile]:
    """The first row of the table that takes `tokens`."""
    return next(routes for most, routes in ROUTES if tokens <= most)
