"""From a transformers checkpoint to fused weights: q, k, v in one matrix, gate and up in one, norms folded in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nanofw.attention import Prologue
from nanofw.errors import PluginError
from nanofw.kv_cache import LayerSpec
from nanofw.weights import ModelSource

FAMILIES = ("qwen3", "llama")


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """A layer, norms folded in: `qkv` `[(Hq + 2 Hkv) D, K]`, `o` `[K, Hq D]`, `gate_up` `[2 I, K]`, `down` `[K, I]`."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    prologue: Prologue


@dataclass(frozen=True, slots=True, eq=False)
class FusedWeights:
    """A whole model: `embedding` and `head` `[V, K]` (the head with the final norm folded in), `cos` `[max_len, D]`."""

    embedding: torch.Tensor
    head: torch.Tensor
    layers: list[LayerWeights]
    layer_specs: tuple[LayerSpec, ...]
    cos: torch.Tensor
    eps: float
    bytes_read: int


def refusals(config: Any) -> list[str]:
    """Why a model of this config cannot be fused; empty if it can."""
    reasons = []
    if config.model_type not in FAMILIES:
        reasons.append(f"model type {config.model_type!r} (it takes {', '.join(FAMILIES)})")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            reasons.append(f"biases ({name})")
    if getattr(config, "hidden_act", "silu") != "silu":
        reasons.append(f"activation {config.hidden_act!r} (it takes silu)")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        reasons.append("sliding windows")
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        reasons.append("rotary embedding longrope, whose frequencies depend on the longest request of a batch")
    return reasons


def load(source: ModelSource, dtype: torch.dtype, device: torch.device) -> FusedWeights:
    """Load and rearrange. Raises PluginError with all reasons if the model has another shape; CheckpointError."""
    if reasons := refusals(source.config):
        raise PluginError(f"model plugin 'fused' cannot serve {source.name}: it has no {'; no '.join(reasons)}")
    module: Any = source.load_module(torch.float32 if dtype == torch.float32 else dtype, device, "eager")
    config, core = source.config, module.model
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spec = LayerSpec(config.num_attention_heads, config.num_key_value_heads, head_size, head_size**-0.5)
    cos, sin = _rope(core, config.max_position_embeddings, device)
    eps = config.rms_norm_eps

    def layer(w: Any) -> LayerWeights:
        attention, mlp = w.self_attn, w.mlp
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        norm = getattr(attention, "q_norm", None)
        return LayerWeights(
            qkv=_fold(qkv, w.input_layernorm.weight),
            o=attention.o_proj.weight.contiguous(),
            gate_up=_fold(gate_up, w.post_attention_layernorm.weight),
            down=mlp.down_proj.weight.contiguous(),
            prologue=Prologue(
                cos=cos,
                sin=sin,
                q_norm=None if norm is None else attention.q_norm.weight,
                k_norm=None if norm is None else attention.k_norm.weight,
                eps=eps,
            ),
        )

    with torch.inference_mode():
        layers = [layer(w) for w in core.layers]
        head = _fold(module.lm_head.weight, core.norm.weight)
    used = [t for w in layers for t in (w.qkv, w.o, w.gate_up, w.down)] + [head]
    return FusedWeights(
        embedding=core.embed_tokens.weight,
        head=head,
        layers=layers,
        layer_specs=(spec,) * len(layers),
        cos=cos,
        eps=eps,
        bytes_read=sum(t.numel() * t.element_size() for t in used),
    )


def _fold(weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """`W @ (g * x)` as `(W * g) @ x`, multiplied in float32 and rounded once."""
    return (weight.float() * norm.float()).to(weight.dtype).contiguous()


@torch.inference_mode()
def _rope(core: Any, max_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin of every position, `[max_len, D]` float32, by the model's own rotary module (scaled kinds too)."""
    probe = torch.zeros(1, device=device, dtype=torch.float32)
    cos, sin = core.rotary_emb(probe, torch.arange(max_len, device=device)[None])
    return cos[0].float().contiguous(), sin[0].float().contiguous()
