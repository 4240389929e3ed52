"""From what `--model` says to a `ModelSource`: config, tokenizer and weights."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanofw.errors import CheckpointError
from nanofw.options import listing, suggest

if TYPE_CHECKING:
    import torch


class ModelSource(ABC):
    """A model that can be loaded: what a model plugin builds itself from.

    Attributes:
        name: as the user wrote it.
        config: the transformers config (of the text decoder, where a model has more parts). Copy it before changing it.
        eos_token_ids: every id that ends a sequence, from generation config, config and tokenizer, in that order.
    """

    name: str
    config: Any
    eos_token_ids: tuple[int, ...]

    @abstractmethod
    def load_module(self, dtype: torch.dtype, device: torch.device, attn_implementation: str) -> torch.nn.Module:
        """The transformers module, with a config of its own: eval mode, no gradients, every weight from the source.

        Args:
            dtype: of the weights.
            device: where they go.
            attn_implementation: a name known to transformers' `AttentionInterface`.

        Raises:
            CheckpointError: naming file and tensor.
        """

    @abstractmethod
    def load_tokenizer(self) -> Any:
        """A fast tokenizer of transformers. Raises CheckpointError."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The checkpoint's own dtype."""


def resolve(name: str, *, trust_remote_code: bool = False, allow_pickle: bool = False) -> ModelSource:
    """Find a model.

    Args:
        name: `smollm2`, `dummy:NAME`, a local transformers folder, or a hub id `org/name`, tried in this order.
        trust_remote_code: let a checkpoint bring its own code.
        allow_pickle: read pickled weights.

    Raises:
        CheckpointError: there is no such model, or its files are not whole.
    """
    from nanofw.weights import dummy, folder, hub, smollm2

    if name.startswith(dummy.PREFIX):
        return dummy.DummySource(name)
    if name == smollm2.NAME:
        return folder.FolderSource(name, smollm2.find())
    path = Path(name).expanduser()
    if name and path.is_dir():
        return folder.FolderSource(name, path, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    if path.is_file():
        raise CheckpointError(f"model {name!r} is a file; name the transformers folder that it lies in")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        fetched = hub.fetch(name, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        return folder.FolderSource(name, fetched, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    known = [smollm2.NAME, *dummy.names()]
    raise CheckpointError(
        f"no model {name!r}{suggest(name, known)}: it is no folder here and no hub id of the form org/name; "
        f"built in are {listing(known)}"
    )
