"""Models without layers, whose tokens are known in advance.

`NullModel` costs almost nothing: what is left of a step is the engine itself. `ContextModel` reads all keys and values
of a request: a scheduler or cache that loses, repeats or mixes up one token of the context is found out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from nanofw.attention import Attention
from nanofw.batch import Batch, Sampling
from nanofw.component import NoOptions
from nanofw.draw import sample
from nanofw.kv_cache import LayerKV, LayerSpec
from nanofw.model import Model, ModelSpec
from nanofw.request import SamplingParams
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


class ContextModel(NullModel):
    """Its next token is a function of the whole context, as the KV cache holds it: of each token and of its position.

    It writes token ids as keys and positions as values through `attention.write_kv`, and reads them by the block table.
    Needs a cache in the layout paged-nhd whose dtype holds these numbers exactly (float32 holds all below 2**24).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        generator = torch.Generator().manual_seed(1)
        self._weights = torch.randint(1 << 62, (2, self.spec.max_len + 1), generator=generator).to(self.spec.device)
        self._best = self._logits.argmax(dim=-1).tolist()

    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """Logits `[B, V]`, each row one of a fixed set, chosen by a hash of what the cache holds up to that token."""
        (layer,) = kv
        marks = torch.stack((batch.token_ids, batch.positions + 1)).to(layer.key.dtype)
        attention.write_kv(marks[0, :, None, None], marks[1, :, None, None], layer, batch)
        table = batch.block_table.long()
        width = min(table.shape[1] * layer.block_size, self._weights.shape[1])
        owner = torch.searchsorted(batch.cu_seqlens_q, batch.logits_indices.int(), right=True) - 1
        position = batch.positions[batch.logits_indices]
        keys, values = (t[table].flatten(1)[:, :width].long() for t in (layer.key, layer.value))
        terms = keys * self._weights[0, :width] + values * self._weights[1, :width]
        return self._logits.index_select(0, _choice(terms.cumsum(dim=1)[owner, position.clamp(max=width - 1)]))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that must follow `prompt` at temperature 0."""
        return self.generate(prompt, count, SamplingParams(temperature=0))

    def generate(
        self, prompt: Sequence[int], count: int, params: SamplingParams, ends: Collection[int] = ()
    ) -> list[int]:
        """The tokens that must follow `prompt`: `count`, or fewer if one of `ends` comes first (it is included).

        Args:
            params: temperature, top-k, top-p, seed and min_tokens are honoured; a random choice needs a seed.
        """
        tokens, total = list(prompt), 0
        weights = self._weights[:, : len(prompt) + count].tolist()
        for position in range(len(prompt) + count - 1):
            total += tokens[position] * weights[0][position] + (position + 1) * weights[1][position]
            if position >= len(prompt) - 1:
                chosen = _choice(total)
                tokens.append(self._sample(chosen, params, position + 1) if params.temperature else self._best[chosen])
                if tokens[-1] in ends and len(tokens) >= len(prompt) + params.min_tokens:
                    break
        return tokens[len(prompt) :]

    def _sample(self, chosen: int, params: SamplingParams, position: int) -> int:
        assert params.seed is not None
        here = Sampling(
            temperature=torch.tensor([params.temperature]),
            top_k=torch.tensor([params.top_k]),
            top_p=torch.tensor([params.top_p]),
            seed=torch.tensor([params.seed]),
            position=torch.tensor([position]),
            greedy=False,
            truncated=params.top_k > 0 or params.top_p < 1,
            logprobs=-1,
        )
        return int(sample(self._logits[chosen : chosen + 1], here).tokens)


def _choice(total: Any) -> Any:
    """Which row of the fixed logits, from the middle bits of a sum that may have wrapped around at 64 bits."""
    return (total >> 20 & 0xFFFF) % _PERIOD
