"""Is this attention right? Asked before it is timed: a wrong one is fast for free."""

from __future__ import annotations

from dataclasses import replace

import torch

from nanofw.attention import Attention, AttentionSpec
from nanofw.options import build_options
from nanofw.testing.attention_base import compare, run
from nanofw.testing.cases import DTYPES, Case, Dense, numbers
from nanofw.testing.layout import lay_out


def assert_right(attention: type[Attention], spec: AttentionSpec) -> None:
    """Decode, prefill and a mix of both around the edges of a block, for each kind of layer in `spec`.

    This is a look, not a verdict: `AttentionSuite` is. It takes less than a second.

    Raises:
        AssertionError: which request is off, by how much, and what is allowed.
    """
    size = spec.block_size
    contexts = (1, size - 1, size, size + 1, 6 * size + 1) if size > 1 else (1, 2, 7)
    mixed = tuple(min(n, s) for n, s in zip((1, 7, 1, 1000, 20), contexts, strict=False))
    for layer in dict.fromkeys(spec.layers):
        case = Case(
            contexts=contexts,
            dtype=next(name for name, dtype in DTYPES.items() if dtype == spec.dtype),
            head_size=layer.head_size,
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            block_size=size,
            window=layer.window,
            soft_cap=layer.soft_cap,
        )
        for queries in (None, contexts, mixed):
            check_case(attention, replace(case, queries=queries), spec.device)


def check_case(attention: type[Attention], case: Case, device: torch.device) -> None:
    """One step against the reference. Raises AssertionError."""
    dense = numbers(case, device)
    problem = lay_out(case, dense)
    options = build_options(attention.Options, {}, attention.__name__)
    compare(problem, dense, run(attention(case.spec(device), options), problem))


def ends(case: Case, dense: Dense) -> tuple[Case, Dense]:
    """The first and the last request of a case alone: enough to see whether a large case is right."""
    at = sorted({0, len(case.contexts) - 1})
    queries = None if case.queries is None else tuple(case.queries[i] for i in at)
    part = replace(case, contexts=tuple(case.contexts[i] for i in at), queries=queries)
    return part, Dense(*([numbers[i] for i in at] for numbers in (dense.q, dense.k, dense.v)))
