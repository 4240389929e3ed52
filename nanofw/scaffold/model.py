"""My own model: the layers of Llama and Qwen3, written out.

Begin at `layer`: every line is one or more launches, and each reads and writes the whole `[T, K]` activations. What can
be fused (norm into projection, gate with up, residual into norm) is in there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import silu

import nanofw
from nanofw import Attention, Batch, LayerKV, LayerSpec, Model, ModelSpec
from nanofw.errors import PluginError

nanofw_api = (1, 0)


class MyModel(Model):
    """Weights of transformers, run by hand: what a layer computes can be read here, and changed."""

    def __init__(self, source: Any, dtype: torch.dtype, device: torch.device, options: Any) -> None:
        config = source.config
        if reasons := missing(config):
            raise PluginError(f"model 'my-model' cannot serve {source.name}: it has no {'; no '.join(reasons)}")
        self.options, self.module = options, source.load_module(dtype, device, "eager")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        layers = (LayerSpec(heads, kv_heads, size, size**-0.5),) * config.num_hidden_layers
        head = self.module.lm_head.weight
        weights = sum(p.numel() * p.element_size() for p in self.module.model.layers.parameters())
        read = weights + head.numel() * head.element_size()
        self.spec = ModelSpec(layers, head.shape[0], config.max_position_embeddings, dtype, device, read)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """Logits `[B, V]` of the tokens at `batch.logits_indices`."""
        model = self.module.model
        x = model.embed_tokens(batch.token_ids)  # [T, K]
        rotation = model.rotary_emb(x, batch.positions[None])
        for weights, cache in zip(model.layers, kv, strict=True):
            x = self.layer(x, weights, rotation, attention, cache, batch)
        logits: torch.Tensor = self.module.lm_head(model.norm(x[batch.logits_indices]))
        return logits

    def layer(self, x: Any, weights: Any, rotation: Any, attention: Attention, kv: LayerKV, batch: Batch) -> Any:
        """One layer: `[T, K]` to `[T, K]`."""
        project, mlp = weights.self_attn, weights.mlp
        h = weights.input_layernorm(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, kv.spec.head_size)) for p in (project.q_proj, project.k_proj, project.v_proj)
        )
        if hasattr(project, "q_norm"):  # Qwen3 has norms of each head
            q, k = project.q_norm(q), project.k_norm(k)
        attended = attention.forward(turn(q, rotation), turn(k, rotation), v, kv, batch)
        x = x + project.o_proj(attended.flatten(1))
        h = weights.post_attention_layernorm(x)
        return x + mlp.down_proj(silu(mlp.gate_proj(h)) * mlp.up_proj(h))


def missing(config: Any) -> list[str]:
    """What a model of this config needs and the layers above do not have: refused by name, never computed wrongly."""
    asked = {
        f"layers of {config.model_type} (it takes llama and qwen3)": config.model_type not in ("llama", "qwen3"),
        "biases": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        "activation but silu": getattr(config, "hidden_act", "silu") != "silu",
        "sliding windows": {*(getattr(config, "layer_types", None) or ())} - {"full_attention"},
        "longrope": (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope",
    }
    return [what for what, wanted in asked.items() if wanted]


def turn(x: torch.Tensor, rotation: Any) -> torch.Tensor:
    """Rotate `[T, H, D]` by position (RoFormer, Su et al., 2021)."""
    cos, sin = (part[0][:, None] for part in rotation)
    low, high = x.chunk(2, dim=-1)
    turned: torch.Tensor = x * cos + torch.cat((-high, low), dim=-1) * sin
    return turned


@nanofw.hookimpl
def nanofw_register_model(register: Any) -> None:
    """Tell nanofw the name."""
    register("my-model", MyModel)
