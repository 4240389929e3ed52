"""Small models of many families of transformers, each with something that a model plugin may overlook."""

from __future__ import annotations

import copy
from typing import Any

import torch

from nanofw.testing.suite import environment_seed
from nanofw.weights import ModelSource

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | settings}


_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0, "original_max_position_embeddings": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-large-eps": ("llama", {"rms_norm_eps": 0.5}),
    "llama-rope-theta": ("llama", _rope("default", rope_theta=50.0)),
    "llama-rope-linear": ("llama", _rope("linear", factor=4.0)),
    "llama-rope-llama3": ("llama", _rope("llama3", **_LLAMA3)),
    "llama-rope-yarn": ("llama", _rope("yarn", **_YARN)),
    "llama-rope-dynamic": ("llama", _rope("dynamic", factor=4.0)),
    "llama-rope-long": ("llama", _rope("longrope", **_LONG)),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-untied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3-attention-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-windows": ("qwen3", {"head_dim": 16, "use_sliding_window": True} | _WINDOWS),
    "qwen2": ("qwen2", {}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma2": ("gemma2", {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5} | _WINDOWS),
    "gemma3": ("gemma3_text", {"head_dim": 16} | _WINDOWS),
    "olmo2": ("olmo2", {}),
    "phi": ("phi", {}),
    "glm4": ("glm4", {"head_dim": 8}),
    "granite": ("granite", {"attention_multiplier": 0.3, "logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gpt2": ("gpt2", {}),
    "gpt_oss": ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1} | _rope("default")),
    "bloom": ("bloom", {}),
}
"""By name: a model type of transformers, and settings beyond the small ones."""


class FamilySource(ModelSource):
    """A small model with random weights, large enough that each of them shows in the logits.

    Args:
        name: one of `FAMILIES`.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoConfig

        model_type, settings = FAMILIES[name]
        self.name, self.eos_token_ids = name, (2,)
        self.config = AutoConfig.for_model(model_type, **copy.deepcopy(_SMALL | settings))

    def load_module(self, dtype: torch.dtype, device: torch.device, attn_implementation: str) -> torch.nn.Module:
        """The same numbers each time (of one `NANOFW_TEST_SEED`), rounded to `dtype`."""
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(environment_seed())
            module: torch.nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attn_implementation
            )
            with torch.no_grad():
                for weight in module.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.2)
        return module.to(device=device, dtype=dtype).eval().requires_grad_(False)

    def load_tokenizer(self) -> None:
        """None: prompts are token ids."""

    @property
    def dtype(self) -> torch.dtype:
        """float32."""
        return torch.float32
