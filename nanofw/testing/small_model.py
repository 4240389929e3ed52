"""A whole decoder in a page of torch, for tests of runners: a token depends on every part of its step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanofw.attention import Attention
from nanofw.batch import Batch
from nanofw.kv_cache import LayerKV, LayerSpec
from nanofw.model import Model, ModelSpec
from nanofw.testing.suite import environment_seed

LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 2, 4, 2, 8
WIDTH = HEADS * HEAD_SIZE


class SmallModel(Model):
    """Two layers of random weights, in float64: batches of other sizes round otherwise, but never to another token.

    Args:
        device: where it runs.
        padding: what the hidden state of padding (slot -1) starts as. Nothing of it may reach a live request.
        vocab_size: V. max_len: positions.
    """

    def __init__(self, device: torch.device, *, padding: float = 0.0, vocab_size: int = 97, max_len: int = 128) -> None:
        generator = torch.Generator().manual_seed(3 + environment_seed())

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device)

        layer = LayerSpec(HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5)
        self.spec = ModelSpec((layer,) * LAYERS, vocab_size, max_len, torch.float64, device)
        self.padding = padding
        self.tokens, self.places = draw(vocab_size, WIDTH), draw(max_len, WIDTH)
        self.qkv = [draw(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, scale=2 * WIDTH**-0.5) for _ in range(LAYERS)]
        self.out = [draw(WIDTH, WIDTH, scale=2 * WIDTH**-0.5) for _ in range(LAYERS)]
        self.head = draw(WIDTH, vocab_size, scale=2 * WIDTH**-0.5)

    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """Logits `[B, V]` float64, see the contract."""
        hidden = self.tokens[batch.token_ids] + self.places[batch.positions]
        hidden = torch.where(batch.slot_mapping[:, None] < 0, self.padding, hidden)
        for into, out, cache in zip(self.qkv, self.out, kv, strict=True):
            heads = (_norm(hidden) @ into).view(batch.num_tokens, -1, HEAD_SIZE)
            q, k, v = heads.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
            hidden = hidden + attention.forward(q, k, v, cache, batch).flatten(1) @ out
        return _norm(hidden)[batch.logits_indices] @ self.head


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
