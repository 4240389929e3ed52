"""What all checks of KV caches share: building one or skipping with its reason, writing and reading a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase

from nanofw.errors import ConfigError
from nanofw.kv_cache import KVCache, KVCacheSpec, LayerSpec
from nanofw.options import build_options

LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=4, scale=0.5)


class KVCacheBase:
    """Base of the groups of checks.

    Class attributes a subclass sets:
        backend: the cache class.
        options: its options, as a user would set them; the suite adds `block_size` where there is such an option.
        shares_prefixes: `match_prefix` may claim another request's blocks.
        device: where the storage lies.
        max_blocks: most blocks that one request may hold, if that is limited.
        bookkeeping: bytes of memory a block, beside its slots and the ids of its tokens.
    """

    backend: ClassVar[type[KVCache]]
    options: ClassVar[Mapping[str, Any]] = {}
    shares_prefixes: ClassVar[bool] = False
    device: ClassVar[str] = "cpu"
    max_blocks: ClassVar[int] = 1000
    bookkeeping: ClassVar[int] = 64

    max_examples: ClassVar[int] = 20
    steps: ClassVar[int] = 40
    phases: ClassVar[Sequence[Phase]] = tuple(Phase)

    @classmethod
    def build(
        cls,
        block_size: int = 16,
        num_blocks: int = 9,
        rows: int = 4,
        max_len: int = 64,
        layers: tuple[LayerSpec, ...] = (LAYER, LAYER),
    ) -> KVCache:
        """A cache of `num_blocks` (the null block included); skips the test if its options refuse the block size.

        `max_len` is lowered to what `max_blocks` can hold.
        """
        max_len = min(max_len, cls.max_blocks * block_size)
        given = dict(cls.options)
        if any(f.name == "block_size" for f in dataclasses.fields(cls.backend.Options)):
            given["block_size"] = block_size
        try:
            options = build_options(cls.backend.Options, given, cls.backend.__name__)
        except ConfigError as error:
            pytest.skip(str(error))
        spec = KVCacheSpec(layers, num_blocks, rows, max_len, torch.float32, torch.device(cls.device))
        if cls.backend.block_slots(spec, options) != block_size:
            pytest.skip(f"{cls.backend.__name__} has blocks of {cls.backend.block_slots(spec, options)} slots only")
        return cls.backend(spec, options)

    @classmethod
    def needs_blocks(cls, count: int) -> None:
        """Skip the test if a request may not hold so many."""
        if cls.max_blocks < count:
            pytest.skip(f"a request of {cls.backend.__name__} holds {cls.max_blocks} blocks, and this needs {count}")

    @classmethod
    def write(cls, cache: KVCache, row: int, position: int, mark: float) -> None:
        """Store `mark` where attention will look for this token. Override it for a layout other than paged-nhd."""
        for layer in cache.layers:
            block, offset = divmod(position, cache.block_size)
            layer.key[cache.block_table[row, block], offset] = mark
            layer.value[cache.block_table[row, block], offset] = -mark

    @classmethod
    def read(cls, cache: KVCache, row: int, position: int) -> float:
        """What `write` stored there, or NaN if the layers, or keys and values, do not agree."""
        block, offset = divmod(position, cache.block_size)
        at = (int(cache.block_table[row, block]), offset)
        found = [m for layer in cache.layers for m in (layer.key[at].flatten(), -layer.value[at].flatten())]
        marks = torch.cat(found)
        return float(marks[0]) if bool((marks == marks[0]).all()) else float("nan")
