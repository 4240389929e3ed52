"""Attention problems: a compact description, the numbers it stands for, and how they lie in memory.

Three things are kept apart, so that a check can change one and hold the others still:

    Case     what is asked: lengths, heads, dtype, window, ..., and a seed
    Dense    the numbers, per request: q, k, v. The truth; the reference reads nothing else
    Problem  the same numbers in a paged cache, with the batch that describes it (see `layout.py`)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st

from nanofw.attention import AttentionSpec, Capabilities
from nanofw.kv_cache import LayerSpec
from nanofw.testing.suite import environment_seed

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

Profile = Literal["normal", "sharp", "tiny", "upper"]
"""Scale of the numbers: standard normal; scores with a deviation of 8, so that few keys win; values of 1e-3; all energy
in the upper half of the head (a kernel that reads only the first half of it gets nothing: triton#621)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One step of attention.

    Attributes:
        contexts: tokens of each request, this step's included.
        queries: tokens each request computes in this step; None: one each (decode).
        padding: trailing requests that only fill a graph's bucket.
    """

    contexts: tuple[int, ...]
    queries: tuple[int, ...] | None = None
    dtype: str = "fp32"
    head_size: int = 64
    heads: int = 8
    kv_heads: int = 2
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    profile: Profile = "normal"
    padding: int = 0
    seed: int = 0

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Tokens each request computes in this step."""
        return (1,) * len(self.contexts) if self.queries is None else self.queries

    def __str__(self) -> str:
        parts = [self.dtype, f"d{self.head_size}", f"h{self.heads}x{self.kv_heads}", f"b{self.block_size}"]
        parts += [f"w{self.window}"] if self.window is not None else []
        parts += [f"cap{self.soft_cap:g}"] if self.soft_cap is not None else []
        parts += [self.profile] if self.profile != "normal" else []
        parts += [f"c{self.contexts[0]}"] if len(self.contexts) == 1 else []
        if self.queries is not None:
            whole = self.queries == self.contexts
            parts.append("prefill" if whole else "decode" if set(self.queries) == {1} else "mixed")
        return "-".join(parts)

    @property
    def layer(self) -> LayerSpec:
        """Geometry of the layer."""
        scale = self.head_size**-0.5
        return LayerSpec(self.heads, self.kv_heads, self.head_size, scale, self.window, self.soft_cap)

    def spec(self, device: torch.device) -> AttentionSpec:
        """What an attention is built for."""
        return AttentionSpec((self.layer,), DTYPES[self.dtype], device, self.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A case's numbers, one entry a request: q `[n, Hq, D]` of this step, k and v `[s, Hkv, D]` of all its tokens."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    def only(self, request: int) -> Dense:
        """One request alone."""
        return Dense([self.q[request]], [self.k[request]], [self.v[request]])


def numbers(case: Case, device: torch.device) -> Dense:
    """The numbers of `case`, the same on every device and whatever the dtype (before rounding).

    `NANOFW_TEST_SEED` in the environment gives all cases other numbers.
    """
    generator = torch.Generator().manual_seed(case.seed + environment_seed())

    def draw(rows: int, heads: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, heads, case.head_size, generator=generator) * scale
        if case.profile == "upper":
            values[..., : case.head_size // 2] = 0
        return values.to(DTYPES[case.dtype]).to(device)

    k = [draw(s, case.kv_heads) for s in case.contexts]
    v = [draw(s, case.kv_heads, 1e-3 if case.profile == "tiny" else 1.0) for s in case.contexts]
    q = [draw(n, case.heads, 8.0 if case.profile == "sharp" else 1.0) for n in case.query_lens]
    return Dense(q, k, v)


def pick(allowed: Collection[Any] | None, *wanted: Any) -> Any:
    """The first wanted value that is allowed; if none is, the smallest allowed one (by its text, where unordered)."""
    if allowed is None:
        return wanted[0]
    return next((w for w in wanted if w in allowed), None) or min(allowed, key=lambda a: (not isinstance(a, int), a))


def spread(allowed: Collection[int] | None) -> list[int]:
    """Some of the allowed values, from the smallest to the largest."""
    values = sorted(allowed or ())
    return list(dict.fromkeys((*values[:: max(len(values) // 5, 1)], *values[-1:])))


def dtype_names(can: Capabilities) -> list[str]:
    """Declared dtypes, by the names used in test ids."""
    return [name for name, dtype in DTYPES.items() if can.dtypes is None or dtype in can.dtypes]


def edges(block_size: int) -> list[int]:
    """Lengths at which paged code goes wrong: 1, and one below, at and above a multiple of the block size."""
    around = {k * block_size + d for k in (1, 2, 3, 4) for d in (-1, 0, 1)}
    return sorted(length for length in around | {1, 2} if length > 0)


@st.composite
def drawn_cases(draw: st.DrawFn, can: Capabilities) -> Case:
    """Ragged batches within what an attention declares. Numbers come from a seed: a failure shrinks to a description.

    Args:
        draw: given by Hypothesis.
        can: the attention's capabilities.
    """
    block_size = draw(st.sampled_from(sorted(can.block_sizes or (1, 3, 8, 16, 32))))
    head_sizes = sorted(can.head_sizes or (16, 40, 64, 80, 96, 128))
    lengths = st.one_of(st.sampled_from([e for e in edges(block_size) if e <= 130]), st.integers(1, 80))
    contexts = draw(st.lists(lengths, min_size=1, max_size=4))
    chunk = st.one_of(st.just(1), st.sampled_from((2, 7, 16, 17, 1000)))
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    return Case(
        contexts=tuple(contexts),
        queries=tuple(min(draw(chunk), context) for context in contexts),
        dtype=draw(st.sampled_from(dtype_names(can))),
        head_size=draw(st.sampled_from(head_sizes)),
        heads=kv_heads * (draw(st.sampled_from((1, 2, 3, 4, 7))) if can.gqa else 1),
        kv_heads=kv_heads,
        block_size=block_size,
        window=draw(st.none() | st.sampled_from((1, 2, 5, 16, 33, 1000))) if can.windows else None,
        soft_cap=draw(st.none() | st.sampled_from((5.0, 50.0))) if can.soft_cap else None,
        profile=draw(st.sampled_from(("normal", "sharp", "tiny", "upper"))),
        padding=draw(st.sampled_from((0, 0, 1, 3))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
