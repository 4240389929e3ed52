"""A model without layers: its next token is a fixed function of the last token and its position.

It costs almost nothing, so what is left of a step is the engine itself; and what it must generate is known in advance,
so a scheduler or cache that loses, repeats or mixes up a token is found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nanofw.attention import Attention
from nanofw.batch import Batch
from nanofw.component import NoOptions
from nanofw.kv_cache import LayerKV, LayerSpec
from nanofw.model import Model, ModelSpec
from nanofw.weights import ModelSource

_PERIOD = 61


class NullSource(ModelSource):
    """Source of a `NullModel`: no weights, no tokenizer.

    Args:
        vocab_size: V. max_len: positions. eos_token_ids: ids that end a sequence.
    """

    def __init__(self, vocab_size: int = 128, max_len: int = 2048, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.name, self.config = "null", None
        self.vocab_size, self.max_len, self.eos_token_ids = vocab_size, max_len, eos_token_ids

    def load_module(self, dtype: torch.dtype, device: torch.device, attn_implementation: str) -> torch.nn.Module:
        """There is none."""
        raise NotImplementedError("the null model has no module")

    def load_tokenizer(self) -> None:
        """None: prompts are token ids."""

    @property
    def dtype(self) -> torch.dtype:
        """float32."""
        return torch.float32


class NullModel(Model):
    """Fixed logits. One layer of one head of size 1 gives the KV cache something to manage; attention is not called."""

    def __init__(
        self,
        source: ModelSource,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        options: Any = NoOptions(),  # noqa: B008 (frozen, and has no fields)
    ) -> None:
        assert isinstance(source, NullSource)
        device = device or torch.device("cpu")
        layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0)
        self.spec = ModelSpec((layer,), source.vocab_size, source.max_len, dtype, device)
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(_PERIOD, source.vocab_size, generator=generator, dtype=dtype).to(device)

    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """Logits `[B, V]`, each row one of a fixed set."""
        last = batch.token_ids.index_select(0, batch.logits_indices)
        position = batch.positions.index_select(0, batch.logits_indices)
        return self._logits.index_select(0, (last * 7 + position).remainder_(_PERIOD))

    def next_token(self, token: int, position: int) -> int:
        """The likeliest token after `token` at `position`: what greedy generation must give."""
        return int(self._logits[(token * 7 + position) % _PERIOD].argmax())

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that must follow `prompt`."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tokens[-1], len(tokens) - 1))
        return tokens[len(prompt) :]
