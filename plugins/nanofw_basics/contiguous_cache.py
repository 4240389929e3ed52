"""KV cache of one slab a request: the textbook baseline that paging replaced.

Each request gets room for the longest request there can be, whatever its own length, so few fit, and most of the memory
is never written. In exchange its tokens lie side by side.
"""

from __future__ import annotations

from nanofw.component import NoOptions
from nanofw.kv_cache import KVCacheSpec
from nanofw_basics.paged_cache import PagedKVCache


class ContiguousKVCache(PagedKVCache):
    """Blocks as long as the longest request, one a request."""

    Options = NoOptions  # type: ignore[assignment]
    max_blocks = 1

    @classmethod
    def block_bytes(cls, spec: KVCacheSpec, options: NoOptions) -> int:  # type: ignore[override]
        """K and V of `max_len` tokens in every layer."""
        return super().block_bytes(spec, PagedKVCache.Options(spec.max_len))

    @classmethod
    def block_slots(cls, spec: KVCacheSpec, options: NoOptions) -> int:  # type: ignore[override]
        """`max_len`."""
        return spec.max_len

    def __init__(self, spec: KVCacheSpec, options: NoOptions) -> None:
        super().__init__(spec, PagedKVCache.Options(spec.max_len))

    @property
    def capacity(self) -> int:
        """A request has one slab, however many there are."""
        return self.block_size
