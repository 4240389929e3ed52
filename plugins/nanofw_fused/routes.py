"""Which kernel computes which projection, by batch: the one table, chosen by measurement (`benchmarks/h200.py`).

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
        bk, stages: elements of K a loop turn, and turns in flight (tiled).
    """

    route: Route
    bn: int = 16
    warps: int = 8
    splits: int = 1
    bk: int = 128
    stages: int = 4


CUBLAS = Tile("cublas")

ROUTES: tuple[tuple[int, dict[Projection, Tile]], ...] = (
    (
        16,
        {
            "qkv": Tile("slab", bn=32),
            "o": Tile("slab", bn=16),
            "gate_up": Tile("slab", bn=16),
            "down": Tile("slab", bn=16),
            "head": Tile("slab", bn=32),
        },
    ),
    (
        64,
        {
            "qkv": Tile("tiled", bn=32, warps=4),
            "o": Tile("tiled", bn=32, warps=4, splits=4),
            "gate_up": Tile("tiled", bn=32, warps=4),
            "down": Tile("tiled", bn=32, warps=4, splits=4),
            "head": CUBLAS,
        },
    ),
    (1 << 62, {"qkv": CUBLAS, "o": CUBLAS, "gate_up": CUBLAS, "down": CUBLAS, "head": CUBLAS}),
)
"""Largest batch (tokens in the step) of a row, and its routes."""


def routes_for(tokens: int) -> dict[Projection, Tile]:
    """The first row of the table that takes `tokens`."""
    return next(routes for most, routes in ROUTES if tokens <= most)
