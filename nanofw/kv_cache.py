"""Contract of a KV cache: storage in a named layout, and the management of its blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nanofw.component import Component

if TYPE_CHECKING:
    import numpy as np

    from nanofw.table import IntArray, TokenIds

PAGED_NHD = "paged-nhd"
"""Layout in which key and value are two tensors `[N, BS, Hkv, D]`; the stride of a block may exceed `BS * Hkv * D`."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Geometry of one attention layer, as the model declares it.

    Attributes:
        num_heads: Hq.
        num_kv_heads: Hkv, a divisor of Hq.
        head_size: D, of q, k and v alike.
        scale: factor on `q @ k`.
        window: keys each query sees, itself included (None: all before it).
        soft_cap: scores become `cap * tanh(score / cap)` before masking (None: unchanged).
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """One layer's cache, with what attention needs to know of that layer.

    Attributes:
        index: the layer's number, from 0.
        spec: its geometry.
        key, value: storage in the layout named by `layout`.
        block_size: slots a block.
        layout: "paged-nhd" unless a cache says otherwise.
    """

    index: int
    spec: LayerSpec
    key: torch.Tensor
    value: torch.Tensor
    block_size: int
    layout: str = PAGED_NHD


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What a cache is built for.

    Attributes:
        layers: geometry of each layer.
        num_blocks: blocks in the pool, the null block included.
        rows: most requests at once.
        max_len: most tokens a request can have.
        dtype, device: of the storage.
    """

    layers: tuple[LayerSpec, ...]
    num_blocks: int
    rows: int
    max_len: int
    dtype: torch.dtype
    device: torch.device


class KVCache(Component):
    """Storage and block management. Requests are known by their row in the `RequestTable`.

    A block belongs to the rows whose tables name it. A plugin must keep three promises, which `check_integrity` checks:
    every block is free or owned, never both; an owned block is never handed out again; the null block is never owned.

    Class attributes a plugin declares:
        layout: name of the layout of its storage, which an attention must know.
        shares_prefixes: `match_prefix` may claim another request's blocks.
        max_blocks: most blocks that one request may hold, or None if nothing but the pool limits it.

    Attributes a subclass sets:
        layers: one `LayerKV` a layer.
        block_size: slots a block.
        num_blocks: blocks in the pool, the null block included.
        block_table: `[rows, max_blocks]` int32 numpy array, tails filled with the null block. The engine reads it.
    """

    layout: ClassVar[str] = PAGED_NHD
    shares_prefixes: ClassVar[bool] = False
    max_blocks: ClassVar[int | None] = None
    layers: Sequence[LayerKV]
    block_size: int
    num_blocks: int
    block_table: np.ndarray[Any, np.dtype[np.int32]]

    @classmethod
    @abstractmethod
    def block_bytes(cls, spec: KVCacheSpec, options: Any) -> int:
        """Bytes that one block takes over all layers, for turning memory into blocks."""

    @classmethod
    @abstractmethod
    def block_slots(cls, spec: KVCacheSpec, options: Any) -> int:
        """Slots a block has under these options."""

    @abstractmethod
    def __init__(self, spec: KVCacheSpec, options: Any) -> None:
        """Make the storage, filled with finite numbers: a masked NaN is still a NaN."""

    @property
    @abstractmethod
    def free_blocks(self) -> int:
        """Blocks that can be handed out now."""

    @property
    def capacity(self) -> int:
        """Tokens that one request alone could keep in the cache."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def match_prefix(self, row: int, token_ids: TokenIds) -> int:
        """Begin a request in `row`: claim blocks that already hold a prefix of `token_ids`.

        Args:
            row: holds nothing yet.
            token_ids: the tokens that the request has so far.

        Returns:
            Tokens whose K and V are there, at most `len(token_ids) - 1`, since the logits of the last one are
            needed.
        """
        return 0

    def worth_waiting(self, row: int) -> bool:
        """Whether the next block that `row` lacks, after those that `match_prefix` claimed, is being computed now.

        Another row fills it with the same tokens: who begins once that has been committed will find it. True only while
        the other row is held, so that nobody waits for what will never come.
        """
        return False

    def fork(self, source: int, row: int, length: int) -> int:
        """Begin a request in `row` with the first `length` tokens of `source`, all of them computed, by sharing blocks.

        Both may go on to write: whoever is about to write into a block that the other reads gets a copy of it.

        Args:
            source: the row to share with.
            row: holds nothing yet.
            length: tokens to share.

        Returns:
            `length`; 0 if this cache does not share blocks, and then nothing has changed.
        """
        return 0

    @abstractmethod
    def allocate(self, rows: IntArray, lengths: IntArray) -> bool:
        """Make room so that each `rows[i]` can hold `lengths[i]` tokens: all of it, or nothing and False.

        Args:
            rows: `[B]` int64, no row twice.
            lengths: `[B]` int64, tokens, those that a row holds already included.
        """

    def commit(self, rows: IntArray, lengths: IntArray, tokens_of: Callable[[int], TokenIds]) -> None:
        """The first `lengths[i]` tokens of `rows[i]` have been computed; only now may others reuse their blocks.

        Args:
            rows: `[B]` int64.
            lengths: `[B]` int64, tokens.
            tokens_of: gives a row's token values, at least as many as were computed.
        """

    @abstractmethod
    def free(self, row: int) -> None:
        """Give back all that `row` holds."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, whatever an interrupted call has left: no row holds anything, and all blocks are free."""

    def recover(self) -> None:
        """A call has failed half-way: as `clear`, but what had been committed before may still be found."""
        self.clear()

    @abstractmethod
    def check_integrity(self) -> None:
        """Check the promises of the class. For tests, not for the step.

        Raises:
            AssertionError: says which one is broken.
        """
