"""The fused model: the layers of Qwen3 and Llama in about five kernels each.

Small batches: [norm + QKV] [qk-norm + rope + cache write + attention] [output projection + residual]
               [norm + gate/up + SiLU] [down + residual]
Larger ones put the sum of partials, the residual and the norm into a kernel of their own, and leave the products to
tiles or to cuBLAS. `routes.py` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nanofw.attention import Attention
from nanofw.batch import Batch
from nanofw.kv_cache import LayerKV
from nanofw.launch import no_triton, shared_memory
from nanofw.model import Model, ModelSpec
from nanofw.pdl import available
from nanofw.weights import ModelSource
from nanofw_fused.load import FusedWeights, LayerWeights, load
from nanofw_fused.project import Projector
from nanofw_fused.routes import Projection, Tile, routes_for


class FusedModel(Model):
    """Qwen3, Llama and SmolLM2 checkpoints, any floating dtype."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Needs Triton."""
        return no_triton()

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device, options: Any) -> None:
        self.options = options
        self.weights: FusedWeights = load(source, dtype, device)
        weights = self.weights
        self.spec = ModelSpec(
            layers=weights.layer_specs,
            vocab_size=weights.head.shape[0],
            max_len=weights.cos.shape[0],
            dtype=dtype,
            device=device,
            weight_bytes=weights.bytes_read,
        )
        self._project = Projector(dtype, available(device), shared_memory(device))

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """Logits `[B, V]`, see the contract."""
        weights = self.weights
        hidden = self._project.embed(batch.token_ids, weights.embedding)
        routes = routes_for(batch.num_tokens)
        layer = self._small_layer if routes["qkv"].route == "slab" else self._large_layer
        parts: torch.Tensor | None = None
        for w, cache in zip(weights.layers, kv, strict=True):
            hidden, parts = layer(hidden, parts, w, attention, cache, batch, routes)
        return self._logits(hidden, parts, batch)

    def _small_layer(
        self,
        hidden: torch.Tensor,
        parts: torch.Tensor | None,
        w: LayerWeights,
        attention: Attention,
        kv: LayerKV,
        batch: Batch,
        routes: dict[Projection, Tile],
    ) -> tuple[torch.Tensor, None]:
        """Five kernels, norms and residuals inside, so `parts` is None. `hidden` `[T, K]`."""
        slab, eps = self._project.slab, self.weights.eps
        qkv = slab(hidden, w.qkv, routes["qkv"], eps=eps)
        attended = attention.forward_packed(qkv, w.prologue, kv, batch)
        hidden = slab(attended, w.o, routes["o"], residual=hidden)
        gated = slab(hidden, w.gate_up, routes["gate_up"], eps=eps, gated=True)
        return slab(gated, w.down, routes["down"], residual=hidden), None

    def _large_layer(
        self,
        hidden: torch.Tensor,
        parts: torch.Tensor | None,
        w: LayerWeights,
        attention: Attention,
        kv: LayerKV,
        batch: Batch,
        routes: dict[Projection, Tile],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Seven or eight kernels. `parts` is what the layer before has still to add to `hidden`."""
        project, eps = self._project, self.weights.eps
        normed = project.add_norm(hidden, parts, eps)
        qkv = self._product(normed, w.qkv, routes["qkv"])
        attended = attention.forward_packed(qkv, w.prologue, kv, batch)
        parts = self._product(attended, w.o, routes["o"])
        normed = project.add_norm(hidden, parts, eps)
        if routes["gate_up"].route == "cublas":
            gated = project.gate(torch.mm(normed, w.gate_up.t()))
        else:
            gated = project.tiled(normed, w.gate_up, routes["gate_up"], gated=True)
        return hidden, self._product(gated, w.down, routes["down"])

    def _product(self, x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
        return torch.mm(x, weight.t()) if tile.route == "cublas" else self._project.tiled(x, weight, tile)

    def _logits(self, hidden: torch.Tensor, parts: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        weights, rows = self.weights, batch.logits_indices.shape[0]
        if batch.max_query_len > 1 or rows != batch.num_tokens:  # only some tokens have logits
            hidden = hidden[batch.logits_indices]
            if parts is not None:
                parts = parts[..., batch.logits_indices, :]
        return self._product(self._project.add_norm(hidden, parts, weights.eps), weights.head, routes_for(rows)["head"])
