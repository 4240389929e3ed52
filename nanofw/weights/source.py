"""From what `--model` says to a `ModelSource`: config, tokenizer and weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class ModelSource(ABC):
    """A model that can be loaded: what a model plugin builds itself from.

    Attributes:
        name: as the user wrote it.
        config: the transformers config (text decoder).
        eos_token_ids: every id that ends a sequence, from generation config, config and tokenizer, in that order.
    """

    name: str
    config: Any
    eos_token_ids: tuple[int, ...]

    @abstractmethod
    def load_module(self, dtype: torch.dtype, device: torch.device, attn_implementation: str) -> torch.nn.Module:
        """The transformers module in eval mode, all weights present. Raises CheckpointError, naming file and tensor."""

    @abstractmethod
    def load_tokenizer(self) -> Any:
        """A fast tokenizer of transformers."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The checkpoint's own dtype."""


def resolve(name: str, *, trust_remote_code: bool = False, allow_pickle: bool = False) -> ModelSource:
    """Find the model `name`: a local folder, a hub id, `smollm2`, or `dummy:NAME`. Raises CheckpointError."""
    raise NotImplementedError
