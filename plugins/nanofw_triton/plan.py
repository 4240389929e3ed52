"""What one step of `triton-paged` needs, made once for all layers: who decodes, how contexts are cut, who prefills.

Shapes of launches follow from declared bounds and from what the host knows, never from the device's lengths, so that a
CUDA graph can hold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton

from nanofw.attention import AttentionSpec
from nanofw.batch import Batch
from nanofw.launch import launch
from nanofw_triton.kernels.order import order_kernel

if TYPE_CHECKING:
    from nanofw.table import IntArray

MAX_SPLITS = 32
FULL = 8
"""Programs a multiprocessor to aim for when contexts are split: of one warp each, that many run at once."""
SHORTEST_SPLIT = 256
"""Keys below which a split is not worth its merge."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How decode is launched: `tile` keys a loop turn, `warps`, `stages` turns in flight, `splits` of each context."""

    tile: int
    warps: int
    stages: int
    splits: int


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Where splits leave their parts: flat tensors, as large as the layer with the most heads needs.

    Attributes:
        partial: `[splits, T, Hq, D]` float32, each split's result. lse: `[splits, T, Hq]` float32, its log-sum, base 2.
        arrived: `[T, Hkv]` int32, splits done; back at zero after each launch.
    """

    partial: torch.Tensor
    lse: torch.Tensor
    arrived: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step.

    Attributes:
        decoding: how many requests have one query token. requests: `[decoding]` int32, which, the longest context
            first: programs that start last should not be those that run longest. None if all do and start at once.
        shape: how they are launched. workspace: for split contexts, the same for every layer; None if they are whole.
        tiles: `[tiles, 2]` int32, request and first query of each prefill tile; None if nothing is prefilled.
        queries: query tokens a prefill tile.
    """

    decoding: int
    requests: torch.Tensor | None
    shape: DecodeShape
    workspace: Workspace | None
    tiles: torch.Tensor | None = None
    queries: int = 0


def make_plan(spec: AttentionSpec, batch: Batch, splits: int, multiprocessors: int) -> Plan:
    """Sort requests into decode and prefill, by the host's lengths.

    Args:
        spec: the attention's. batch: the step.
        splits: of each decode context; 0 chooses.
        multiprocessors: of the device.
    """
    query_lens = batch.query_lens_host
    single = np.flatnonzero(query_lens == 1)
    programs = max(len(single), 1) * spec.layers[0].num_kv_heads
    shape = decode_shape(programs, batch.max_seq_len, spec.layers[0].head_size, splits, multiprocessors)
    workspace = make_workspace(spec, shape.splits, batch.num_tokens)
    many = np.flatnonzero(query_lens > 1)
    if not len(many):
        at_once = programs * shape.splits <= multiprocessors * FULL // 2
        return Plan(batch.num_requests, None if at_once else longest_first(batch.seq_lens), shape, workspace)
    single = single[np.argsort(-batch.seq_lens_host[single], kind="stable")]
    group = max(layer.num_heads // layer.num_kv_heads for layer in spec.layers)
    queries = max(triton.next_power_of_2(128 // group), 1) if batch.max_query_len > 16 else max(64 // group, 1)
    return Plan(
        decoding=len(single),
        requests=_upload(single.astype(np.int32), spec.device),
        shape=shape,
        workspace=workspace,
        tiles=_upload(_tiles(many, query_lens[many], queries), spec.device),
        queries=queries,
    )


def decode_shape(programs: int, max_seq_len: int, head_size: int, splits: int, multiprocessors: int) -> DecodeShape:
    """The launch shape for `programs` (requests times KV heads) and a bound of context.

    Contexts are split until the GPU is full, but not into parts too short to be worth the merge. Few programs want many
    keys in flight each; many want few registers each, so that more of them run at once. Measured on an H200 by
    `benchmarks/tune_attention.py`, at head size 128, us a layer; a range stands for contexts of all lengths in it:

        batch x context     1 x 100   16 x 100   64 x 100   256 x 100   256 x 1000   64 x 100-2000   256 x 100-2000
        splits                    1          1          1           1            1               2                1
        128 keys, 4 warps       3.1        4.4
        64 keys, 2 warps        4.8        6.5       10.7                      254            71.8              259
        32 keys, 1 warp                                          34.3          246                              252
        in no order                                                                             85              286
        bandwidth floor         0.1        1.5        5.9        23.4          234              61              246
    """
    if not splits:
        wanted = min(multiprocessors * FULL // programs, -(-max_seq_len // SHORTEST_SPLIT), MAX_SPLITS)
        splits = 1 << max(wanted, 1).bit_length() - 1
    if head_size > 128:
        return DecodeShape(tile=32, warps=4, stages=2, splits=splits)
    if programs * splits <= multiprocessors:
        return DecodeShape(tile=128, warps=4, stages=1, splits=splits)
    if programs * splits <= multiprocessors * FULL:
        return DecodeShape(tile=64, warps=2, stages=2, splits=splits)
    return DecodeShape(tile=32, warps=1, stages=2, splits=splits)


def longest_first(seq_lens: torch.Tensor) -> torch.Tensor:
    """`[B]` int32: requests by falling length, found on the device."""
    requests, rows = len(seq_lens), 16
    order = torch.empty(requests, dtype=torch.int32, device=seq_lens.device)
    grid = (triton.cdiv(requests, rows),)
    launch(order_kernel, grid, seq_lens, order, requests, ROWS=rows, REQUESTS_PAD=triton.next_power_of_2(requests))
    return order


def make_workspace(spec: AttentionSpec, splits: int, tokens: int) -> Workspace | None:
    """Room for the parts of `tokens` split contexts, or None if they are whole."""
    if splits == 1:
        return None
    layers, device = spec.layers, spec.device
    heads = splits * tokens * max(layer.num_heads for layer in layers)
    size = splits * tokens * max(layer.num_heads * layer.head_size for layer in layers)
    return Workspace(
        partial=torch.empty(size, dtype=torch.float32, device=device),
        lse=torch.empty(heads, dtype=torch.float32, device=device),
        arrived=torch.zeros(tokens * max(layer.num_kv_heads for layer in layers), dtype=torch.int32, device=device),
    )


def _tiles(requests: IntArray, query_lens: IntArray, queries: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """`[tiles, 2]` int32: each request's query tokens, cut into tiles of `queries`."""
    counts = -(-query_lens // queries)
    owner = np.repeat(np.arange(len(requests)), counts)
    nth = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
    return np.stack((requests[owner], nth * queries), axis=1).astype(np.int32)


def _upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
