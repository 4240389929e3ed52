"""Conformance suite of KV caches.

Subclass it in a test file, and pytest runs all of it on your cache:

    from nanofw.testing import KVCacheSuite
    from my_plugin import MyCache

    class TestMyCache(KVCacheSuite):
        backend = MyCache

A plain model of what the cache should hold is kept beside it: every token written carries a mark of the whole prefix it
stands for, so a block that two requests share wrongly, or that is handed out while owned, shows as a wrong mark.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from nanofw.batch import NULL_BLOCK
from nanofw.errors import ConfigError
from nanofw.kv_cache import PAGED_NHD, KVCache, KVCacheSpec, LayerSpec
from nanofw.options import build_options
from nanofw.testing.kv_cache_machine import KVCacheMachine
from nanofw.testing.kv_cache_served import KVCacheServed

BLOCK_SIZES = (1, 3, 16, 256)
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=4, scale=0.5)


class KVCacheSuite(KVCacheServed):
    """What every KV cache must do.

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

    @pytest.mark.parametrize("block_size", [1, 3, 16, 64], ids="bs{}".format)
    def test_conservation(self, block_size: int) -> None:
        """Random lives of requests against a model: no block lost, none owned twice, no content changed by others.

        Sources: vllm#10583 siblings (jjang-ai/vmlx#68, references never given back), nano-vllm#144 and #208 (cached
        prefixes, blocks hit before they are filled), MinivLLM#77 (lengths that are multiples of the block size).
        """
        self.build(block_size, max_len=block_size)  # skip before Hypothesis starts, if at all

        # Made anew for each suite: Hypothesis refuses one test that several classes inherit (differing executors).
        machine = type(
            f"{type(self).__name__}Machine", (KVCacheMachine,), {"suite": type(self), "block_size": block_size}
        )
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.max_examples,
                stateful_step_count=self.steps,
                phases=self.phases,
                report_multiple_bugs=False,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    @pytest.mark.parametrize("block_size", BLOCK_SIZES, ids="bs{}".format)
    def test_lengths_at_block_edges(self, block_size: int) -> None:
        """k*BS - 1, k*BS and k*BS + 1 tokens take k, k and k + 1 blocks, for k = 1..4 (MinivLLM#77)."""
        cache = self.build(block_size, num_blocks=8, rows=1, max_len=6 * block_size)
        free = cache.free_blocks
        for k in range(1, min(self.max_blocks, 4) + 1):
            for length in range(max(k * block_size - 1, 1), min(k, self.max_blocks - 1) * block_size + 2):
                blocks = -(-length // block_size)
                assert cache.blocks_for(length) == blocks
                cache.match_prefix(0, range(length))
                assert cache.allocate(np.array([0]), np.array([length]))
                assert np.count_nonzero(cache.block_table[0]) == blocks, f"{length} tokens"
                assert cache.free_blocks == free - blocks
                cache.free(0)
        assert cache.free_blocks == free

    def test_one_request_can_fill_the_pool(self) -> None:
        """`capacity` is true, and one token more is refused without a trace (vllm#39734: what never fits must show)."""
        self.needs_blocks(8)
        cache = self.build(16, num_blocks=9, rows=2, max_len=1024)
        assert cache.capacity == 8 * 16
        cache.match_prefix(0, range(cache.capacity))
        assert cache.allocate(np.array([0]), np.array([cache.capacity]))
        assert cache.free_blocks == 0
        before = cache.block_table.copy()
        cache.match_prefix(1, [1])
        assert not cache.allocate(np.array([1]), np.array([1]))
        assert np.array_equal(before, cache.block_table)
        cache.check_integrity()

    def test_allocation_is_all_or_nothing(self) -> None:
        """Three requests of which two would fit: none gets a block, for the caller would never learn of a part."""
        self.needs_blocks(2)
        cache = self.build(16, num_blocks=5, rows=3)
        rows = np.arange(3)
        for row in rows:
            cache.match_prefix(int(row), [int(row)])
        assert not cache.allocate(rows, np.array([32, 32, 1]))
        assert cache.free_blocks == 4
        assert not cache.block_table.any()
        assert cache.allocate(rows, np.array([32, 16, 1]))
        assert cache.free_blocks == 0

    def test_200_requests_give_everything_back(self) -> None:
        """Free blocks after 200 requests == at the start (jjang-ai/vmlx#68: references were never given back)."""
        cache = self.build(16, num_blocks=9, rows=4)
        start = cache.free_blocks
        for number in range(200):
            row, length = number % 4, 1 + number * 7 % min(60, self.max_blocks * 16)
            tokens = [number % 3] * length
            cached = cache.match_prefix(row, tokens)
            assert 0 <= cached < length
            assert cache.allocate(np.array([row]), np.array([length]))
            if number % 5:  # every fifth is aborted before it was computed
                cache.commit(np.array([row]), np.array([length]), lambda _, known=tokens: known)  # type: ignore[misc]
            cache.free(row)
            cache.check_integrity()
        assert cache.free_blocks == start

    @pytest.mark.parametrize("block_size", [3, 16], ids="bs{}".format)
    def test_a_fork_and_its_source_write_apart(self, block_size: int) -> None:
        """Whoever writes first into the shared, partly filled block: the other one still reads what it wrote itself."""
        self.needs_blocks(2)
        for writers in ((0, 1), (1, 0)):
            cache, length = self.build(block_size, num_blocks=9), 2 * block_size - 2
            cache.match_prefix(0, range(length))
            assert cache.allocate(np.array([0]), np.array([length]))
            for position in range(length):
                self.write(cache, 0, position, position + 1.0)
            if not cache.fork(0, 1, length):
                pytest.skip(f"{self.backend.__name__} shares no blocks")
            for row in writers:
                assert cache.allocate(np.array([row]), np.array([length + 1]))
                self.write(cache, row, length, 100.0 + row)
            for row in writers:
                found = [self.read(cache, row, position) for position in range(length + 1)]
                expected = [*np.arange(1.0, length + 1), 100.0 + row]
                assert found == expected, f"row {row} of {writers} reads what the other one wrote"
            cache.check_integrity()

    def test_clear(self) -> None:
        """Whatever was going on: afterwards all is free, no row holds anything, and nothing is found again."""
        cache = self.build(16, num_blocks=9)
        start, longest = cache.free_blocks, min(40, self.max_blocks * 16)
        rows, lengths = np.array([0, 2]), np.array([longest, 16])
        for row in rows:
            cache.match_prefix(int(row), [int(row)] * 40)
        assert cache.allocate(rows, lengths)
        cache.commit(rows, lengths, lambda row: [row] * 40)
        cache.free(2)
        cache.block_table[1] = 3  # what an interrupted call may leave
        cache.clear()
        cache.check_integrity()
        assert cache.free_blocks == start
        assert not cache.block_table.any()
        assert cache.match_prefix(0, [0] * 40) == 0
        assert cache.allocate(np.array([0]), np.array([longest]))
        cache.check_integrity()

    def test_recover(self) -> None:
        """After a call that broke off: all is free and no row holds anything; what is found again has its content."""
        cache = self.build(4, num_blocks=9)
        start, tokens = cache.free_blocks, [5] * min(12, self.max_blocks * 4)
        row, length = np.array([0]), np.array([len(tokens)])
        cache.match_prefix(0, tokens)
        assert cache.allocate(row, length)
        for position in range(len(tokens)):
            self.write(cache, 0, position, position + 1.0)
        cache.commit(row, length - 4, lambda _: tokens)
        cache.match_prefix(1, [6])
        assert cache.allocate(np.array([1]), np.array([1]))
        cache.block_table[2] = 3  # what an interrupted call may leave
        cache.recover()
        cache.check_integrity()
        assert cache.free_blocks == start
        assert not cache.block_table.any()
        found = cache.match_prefix(3, [*tokens, 1])
        assert found <= len(tokens) - 4, "found what had never been committed"
        assert [self.read(cache, 3, position) for position in range(found)] == [n + 1.0 for n in range(found)]
        assert not cache.worth_waiting(3)
        cache.check_integrity()

    def test_bookkeeping_is_small(self) -> None:
        """Memory beside the slots, after every block has been used and committed: at most `bookkeeping` bytes each."""
        blocks = 4096
        tracemalloc.start()
        try:
            cache = self.build(1, blocks + 1, 2, self.max_blocks, (dataclasses.replace(LAYER, head_size=1),))
            for number in range(2 * blocks // self.max_blocks + 1):
                tokens = [number, *range(cache.block_table.shape[1] - 1)]
                cache.match_prefix(0, tokens)
                assert cache.allocate(np.array([0]), np.array([len(tokens)]))
                cache.commit(np.array([0]), np.array([len(tokens)]), lambda _, known=tokens: known)  # type: ignore[misc]
                cache.free(0)
            traced, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        slots = sum(layer.key.nbytes + layer.value.nbytes for layer in cache.layers)
        token_ids = 4 * blocks
        assert (traced - slots - token_ids) / blocks <= self.bookkeeping

    def test_growing_no_request_is_fine(self) -> None:
        """An empty step asks for nothing and gets it."""
        cache = self.build(16)
        assert cache.allocate(np.array([], dtype=np.int64), np.array([], dtype=np.int64))

    def test_storage_is_described_truly(self) -> None:
        """Layers, block table and bytes are what the contract says; memory starts finite, so a mask can hide it."""
        cache = self.build(16, num_blocks=9)
        assert [layer.index for layer in cache.layers] == [0, 1]
        assert all(layer.spec == LAYER and layer.block_size == cache.block_size == 16 for layer in cache.layers)
        assert all(layer.layout == self.backend.layout for layer in cache.layers)
        assert cache.block_table.dtype == np.int32
        assert cache.block_table.shape[0] == 4
        assert (cache.block_table == NULL_BLOCK).all()
        tensors = [tensor for layer in cache.layers for tensor in (layer.key, layer.value)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        length = min(64, self.max_blocks * 16)
        spec = KVCacheSpec((LAYER, LAYER), 9, 4, length, torch.float32, torch.device(self.device))
        options = build_options(self.backend.Options, {**self.options, **_block_size(self.backend, 16)}, "options")
        promised = 9 * self.backend.block_bytes(spec, options)
        assert sum(s.nbytes() for s in storages.values()) == pytest.approx(promised, rel=0.02)
        for layer in cache.layers:
            assert bool(torch.isfinite(layer.key.float()).all() and torch.isfinite(layer.value.float()).all())
            if layer.layout == PAGED_NHD:
                assert layer.key.shape == layer.value.shape == (9, 16, LAYER.num_kv_heads, LAYER.head_size)

    @pytest.mark.parametrize("damage", ["stolen", "leaked", "tail"])
    def test_check_integrity_finds(self, damage: str) -> None:
        """`check_integrity` is what tests rely on: a block owned twice, lost, or named beyond the end is found."""
        cache, blocks = self.build(4, num_blocks=9), min(2, self.max_blocks)
        rows = np.array([0, 1])
        for row, token in enumerate((1, 2)):
            cache.match_prefix(row, [token] * 4 * blocks)
        assert cache.allocate(rows, np.array([4, 4]) * blocks)
        cache.check_integrity()
        if damage == "stolen":
            cache.block_table[0, 0] = cache.block_table[1, 0]
        elif damage == "leaked":
            cache.block_table[0, blocks - 1] = NULL_BLOCK
        else:
            self.needs_blocks(3)
            cache.block_table[0, 2] = max(set(range(1, 9)) - set(cache.block_table[:2].flat))
        with pytest.raises(AssertionError):
            cache.check_integrity()


def _block_size(backend: type[KVCache], size: int) -> dict[str, int]:
    return {"block_size": size} if any(f.name == "block_size" for f in dataclasses.fields(backend.Options)) else {}
