"""How far off a right attention may be: a yardstick scaled to the problem, instead of a fixed tolerance.

A fixed tolerance is wrong both ways. With 1e-2, absolute and relative, dropping the last of 2,048 keys passes; and
right code fails where logits are large. So the plain computation in the same dtype is measured against float64 *on the
same numbers*, and twice its error is allowed, plus what float32 scores and a rounded result can cost.
"""

from __future__ import annotations

import torch

from nanofw.kv_cache import LayerSpec
from nanofw.testing import reference


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """The plain computation of one sequence, every intermediate rounded to the dtype of q. Shapes as in `reference`."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,shd->hns", q, keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    weights = scores.masked_fill(hidden(q.shape[0], k.shape[0], spec.window, q.device), float("-inf")).softmax(dim=-1)
    return torch.einsum("hns,shd->nhd", weights, values)


def hidden(queries: int, keys: int, window: int | None, device: torch.device | None = None) -> torch.Tensor:
    """`[n, s]` bool: which of s keys each of the last n positions must not see."""
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    unseen = key > position
    return unseen if window is None else unseen | (key <= position - window)


def yardstick(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec, expected: torch.Tensor) -> float:
    """Largest error that a right attention may show on this sequence.

    `2*err_naive + 2*eps(float32)*max|score|*max|v| + eps(dtype)*max|expected|`; `expected` is the reference's output.
    """
    error = (naive(q, k, v, spec).cpu().double() - expected).abs().max().item()
    scale = q.abs().max().item() * k.abs().max().item()
    if scale:
        group = q.shape[1] // k.shape[1]
        keys = k.double().repeat_interleave(group, dim=1)
        scale = (torch.einsum("nhd,shd->hns", q.double(), keys) * spec.scale).abs().max().item()
    float32, dtype = torch.finfo(torch.float32).eps, torch.finfo(q.dtype).eps
    return 2 * error + 2 * float32 * scale * v.abs().max().item() + dtype * expected.abs().max().item()


def check(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec, what: str) -> None:
    """Compare one sequence's output `[n, Hq, D]` with the reference.

    Raises:
        AssertionError: says where the largest error is, its size and what was allowed.
    """
    expected = reference.attend(q, k, v, spec)
    allowed = yardstick(q, k, v, spec, expected)
    error = (got.detach().cpu().double() - expected).abs()
    if error.isnan().any():
        raise AssertionError(f"{what}: {int(error.isnan().sum())} of {error.numel()} values are NaN")
    worst = error.max().item()
    if worst > allowed:
        query, head, dim = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{what}: off by {worst:.3g} where {allowed:.3g} is allowed, at query {query}, head {head}, dim {dim}: "
            f"{got[query, head, dim].item():.6g} instead of {expected[query, head, dim].item():.6g}"
        )


def check_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Both tensors hold the same bits (NaN included). Raises AssertionError that says how many differ, and where."""
    different = bits(got) != bits(expected)
    if different.any():
        where = [int(i) for i in different.nonzero()[0]]
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} values have other bits, first at {where}: "
            f"{got[tuple(where)].item():.6g} and {expected[tuple(where)].item():.6g}"
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers of the same size, so that NaN equals NaN and -0 differs from 0."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])
