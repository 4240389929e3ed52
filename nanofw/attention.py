"""Contract of an attention: `attend` is all that a new one must write; the rest has right defaults.

The order of one step: the runner calls `plan(batch)` once, then each layer of the model calls `forward`, which writes
the new K and V into the cache and attends over it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nanofw.component import Component
from nanofw.kv_cache import PAGED_NHD, LayerSpec

if TYPE_CHECKING:
    from nanofw.batch import Batch
    from nanofw.kv_cache import LayerKV


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an attention can do. Everything not declared is refused at construction, and tested by nobody.

    Attributes:
        dtypes: of q, k, v and the cache; None means any floating type.
        devices: "cpu", "cuda", ...; None means any.
        head_sizes, block_sizes: a collection of allowed values, or None for any.
        layouts: cache layouts it reads.
        gqa: fewer key/value heads than query heads.
        windows: sliding windows.
        soft_cap: capped scores.
        graphs: can be captured: no host reads, and launches that depend on declared bounds alone.
        batch_invariant: a request's output has the same bits alone and in any company.
        reads_padding: unused cache slots are read (and masked): NaN there may reach the output.
    """

    dtypes: Collection[torch.dtype] | None = None
    devices: Collection[str] | None = None
    head_sizes: Collection[int] | None = None
    block_sizes: Collection[int] | None = None
    layouts: Collection[str] = (PAGED_NHD,)
    gqa: bool = True
    windows: bool = False
    soft_cap: bool = False
    graphs: bool = False
    batch_invariant: bool = False
    reads_padding: bool = True


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What an attention is asked to serve, for all layers of a model.

    Attributes:
        layers: geometry of each layer, in order.
        dtype: of q, k, v and the cache.
        device: where all of them lie.
        block_size: slots a block of the cache.
        layout: name of the cache's layout.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    block_size: int
    layout: str = PAGED_NHD


@dataclass(frozen=True, slots=True, eq=False)
class Prologue:
    """What a layer does to its raw projections before attention: RMSNorm of each head of q and k, then rotation.

    The rotation (RoFormer, Su et al., 2021) pairs element d with d + D/2.

    Attributes:
        cos, sin: `[max_len, D]` float32, by position.
        q_norm, k_norm: `[D]` weights of the norms, or None where the model has none.
        eps: of the norms.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0

    def split(self, qkv: torch.Tensor, spec: LayerSpec, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make q `[T, Hq, D]`, k and v `[T, Hkv, D]` of `[T, (Hq + 2 Hkv) D]`; float32 inside, rounded once."""
        heads = qkv.view(qkv.shape[0], -1, spec.head_size)
        q, k, v = heads.split_with_sizes((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        cos, sin = self.cos[positions, None], self.sin[positions, None]

        def turn(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
            wide = x.float()
            if weight is not None:
                wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * weight.float()
            low, high = wide.chunk(2, dim=-1)
            return (wide * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)

        return turn(q, self.q_norm), turn(k, self.k_norm), v


class Attention(Component):
    """Attention over a KV cache.

    Class attributes a plugin declares:
        capabilities: what it can do.

    Args:
        spec: what it is asked to serve; `validate` has found no reason against it.
        options: an instance of its `Options`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, spec: AttentionSpec, options: Any) -> None:
        self.spec, self.options = spec, options

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        """Every reason why this attention cannot serve `spec`; empty if it can. Extend it for finer rules."""
        can, reasons = cls.capabilities, []
        allowed: tuple[tuple[str, Any, Collection[Any] | None, Callable[[Any], str]], ...] = (
            ("dtype", spec.dtype, can.dtypes, lambda d: str(d).removeprefix("torch.")),
            ("device", spec.device.type, can.devices, str),
            ("block size", spec.block_size, can.block_sizes, str),
            ("cache layout", spec.layout, can.layouts, str),
            *(("head size", size, can.head_sizes, str) for size in sorted({layer.head_size for layer in spec.layers})),
        )
        for what, got, known, show in allowed:
            if known is not None and got not in known:
                reasons.append(f"{what} {show(got)} (it takes {', '.join(show(k) for k in known)})")
        if not can.gqa and any(layer.num_heads != layer.num_kv_heads for layer in spec.layers):
            reasons.append("grouped-query attention (it needs as many key/value heads as query heads)")
        if not can.windows and any(layer.window is not None for layer in spec.layers):
            reasons.append("sliding windows")
        if not can.soft_cap and any(layer.soft_cap is not None for layer in spec.layers):
            reasons.append("capped scores")
        return reasons

    def plan(self, batch: Batch) -> Any:
        """Prepare once a step what all layers share; layers find the result in `batch.plan`.

        Args:
            batch: the step.

        Returns:
            Whatever its layers want, or None.
        """
        return None

    @abstractmethod
    def attend(self, q: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """Causal attention of this step's queries over all of their requests' keys.

        Args:
            q: `[T, Hq, D]`. Token t of a request with query length n and context length s sits at position
                `s - n + t` and sees the keys at positions up to its own (the last `window` of them, if there is one).
            kv: the layer's cache, this step's K and V already written.
            batch: where each request's tokens and blocks are.

        Returns:
            `[T, Hq, D]`, dtype and device of q. The rows of padding requests, which have no context, are zero.
        """

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, batch: Batch) -> None:
        """Store k and v `[T, Hkv, D]` in the slots of `batch.slot_mapping`; slot -1 is written nowhere.

        Args:
            k: `[T, Hkv, D]`, dtype and device of the cache.
            v: likewise.
            kv: the layer's cache.
            batch: the step.
        """
        slots = batch.slot_mapping
        if batch.num_padding:
            # A padded row rewrites the null block with what is there: no byte changes, and nobody waits for the device.
            live = (slots >= 0)[:, None, None]
            slots = slots.clamp(min=0)
            block, offset = slots // kv.block_size, slots % kv.block_size
            k = torch.where(live, k, kv.key[block, offset])
            v = torch.where(live, v, kv.value[block, offset])
        else:
            block, offset = slots // kv.block_size, slots % kv.block_size
        kv.key[block, offset] = k
        kv.value[block, offset] = v

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """Write k and v, then attend. Shapes as there. A kernel that does both at once overrides this."""
        self.write_kv(k, v, kv, batch)
        return self.attend(q, kv, batch)

    def forward_packed(self, qkv: torch.Tensor, prologue: Prologue, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """Norm and rotate, write, attend: for models that leave the prologue to the attention.

        Args:
            qkv: `[T, (Hq + 2 Hkv) D]`, what the projections gave.
            prologue: what to do to it first.
            kv: the layer's cache.
            batch: the step.

        Returns:
            `[T, Hq D]`. A kernel that does all at once overrides this.
        """
        q, k, v = prologue.split(qkv, kv.spec, batch.positions)
        return self.forward(q, k, v, kv, batch).flatten(1)
