"""Contract of a model: load the weights, run the layers with the attention it is given."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanofw.component import Component

if TYPE_CHECKING:
    from nanofw.attention import Attention
    from nanofw.batch import Batch
    from nanofw.kv_cache import LayerKV, LayerSpec
    from nanofw.weights import ModelSource


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the rest of the engine must know of a model.

    Attributes:
        layers: geometry of each attention layer, in order.
        vocab_size: how many logits a token has, V.
        max_len: positions it was made for.
        dtype: of activations, and so of the KV cache.
        device: where it runs.
        weight_bytes: bytes that a decode step reads at least once.
    """

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_len: int
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int = 0


class Model(Component):
    """A decoder. Holds no state of any request, so several engines may share one.

    Attributes a subclass sets:
        spec: its geometry.
        batch_invariant_on: types of devices on which the logits of a request have the same bits alone and in any
            company, with an attention that has this property. Set by the instance where an option decides.
    """

    spec: ModelSpec
    batch_invariant_on: Collection[str] = ()

    @abstractmethod
    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device, options: Any) -> None:
        """Load the weights.

        Args:
            source: config and tensors.
            dtype: of weights and activations.
            device: where they go.
            options: an instance of its `Options`.

        Raises:
            CheckpointError: they are not whole; names file and tensor.
            PluginError: a model of this config is not served; says why.
        """

    @abstractmethod
    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """Run one step.

        Args:
            batch: the step.
            attention: called once a layer, as `attention.forward(q, k, v, kv[layer], batch)`.
            kv: one cache a layer.

        Returns:
            Logits `[B, V]` of the tokens at `batch.logits_indices`, any floating type, on the device.
        """
