"""Models with random weights: real architectures of transformers, tiny or of real shape, with a byte-level tokenizer.

The same name gives the same weights everywhere. They are drawn so that every part matters: a wrong window, cap, norm
weight or head changes what is generated.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from nanofw.errors import CheckpointError
from nanofw.options import listing, suggest
from nanofw.weights.source import ModelSource

PREFIX = "dummy:"
BOS, EOS, PAD = 256, 257, 258
SEED = 20240

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

_TINY = {"vocab_size": 512, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.15}

# model type of transformers, then what differs from its defaults
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "qwen3",
        _TINY
        | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "llama-tiny": (
        "llama",
        _TINY
        | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "untied-tiny": (
        "llama",
        _TINY
        | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "tie_word_embeddings": False,
        },
    ),
    "smollm2-tiny": (
        "llama",
        _TINY
        | {
            "hidden_size": 144,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "gemma-tiny": (
        "gemma2",
        _TINY
        | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-tiny": (
        "gemma3_text",
        _TINY
        | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
            "initializer_range": 0.03,
            "dtype": "bfloat16",
        },
    ),
    "smollm2-135m": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
            "initializer_range": 0.04,
            "dtype": "bfloat16",
        },
    ),
}


def names() -> list[str]:
    """The dummies there are, as a user writes them."""
    return [PREFIX + shape for shape in _SHAPES]


class DummySource(ModelSource):
    """A model of random weights.

    Args:
        name: one of `names()`. Raises CheckpointError for another.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoConfig

        shape = name.removeprefix(PREFIX)
        if shape not in _SHAPES:
            raise CheckpointError(f"no model {name!r}{suggest(name, names())}; dummies are {listing(names())}")
        model_type, settings = _SHAPES[shape]
        self.name = name
        self.config = AutoConfig.for_model(
            model_type, **copy.deepcopy(settings), bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD
        )
        self.eos_token_ids = (EOS,)

    def load_module(self, dtype: torch.dtype, device: torch.device, attn_implementation: str) -> torch.nn.Module:
        """Random weights, drawn in float32 on the CPU so that every dtype and device rounds the same numbers."""
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            module: torch.nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attn_implementation
            )
        _season(module)
        return module.to(device=device, dtype=dtype).eval().requires_grad_(False)

    def load_tokenizer(self) -> Any:
        """One token a byte; see `byte_tokenizer`."""
        return byte_tokenizer(self.config.vocab_size, self.config.max_position_embeddings)

    @property
    def dtype(self) -> torch.dtype:
        """As the real model's checkpoint; float32 for tiny ones."""
        return self.config.dtype or torch.float32


@torch.no_grad()
def _season(module: Any) -> None:
    """Make every part matter, which plain initial weights do not."""
    generator = torch.Generator().manual_seed(SEED)
    for weight in (p for p in module.parameters() if p.ndim == 1):
        # norms start as ones (zeros in Gemma): a layer that forgets their weights would go unseen
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    for name, weight in module.named_parameters():
        if name.endswith("q_proj.weight"):
            weight.mul_(2.0)  # scores large enough that keys differ
        elif name.endswith("q_norm.weight"):
            weight.add_(1.0)
    embedding = module.get_input_embeddings().weight
    embedding.mul_(0.2)  # else the token itself outweighs all layers, and a tied head repeats it for ever
    if module.get_output_embeddings().weight is embedding:
        module.model.norm.weight.add_(4.0)  # the head is 5 times smaller, so its input is 5 times larger


def byte_tokenizer(vocab_size: int, max_len: int) -> Any:
    """A tokenizer whose ids 0 to 255 are bytes, 256 to 258 bos, eos and pad, and the rest words.

    Encoding any text gives bytes and decoding gives it back. Words are never encoded; they are there so that whatever a
    random model generates is text. No special tokens are added.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD}
    vocab = {char: byte for byte, char in enumerate(_byte_alphabet())} | specials
    vocab |= {f"Ġ{_word(number)}": number for number in range(PAD + 1, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # texts are cut at any length, which keeps BPE (quadratic in its input) fast; there are no merges to lose
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\s\S]{1,64}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_len,
    )


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in plain else next(hidden)) for byte in range(256)]


def _word(number: int) -> str:
    """A pronounceable name for a number, one for each."""
    syllables = []
    while number:
        number, rest = divmod(number, 80)
        syllables.append("bdfgklmnprstvzhj"[rest // 5] + "aeiou"[rest % 5])
    return "".join(syllables)
