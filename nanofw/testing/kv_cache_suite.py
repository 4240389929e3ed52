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
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanofw.batch import NULL_BLOCK
from nanofw.errors import ConfigError
from nanofw.kv_cache import PAGED_NHD, KVCache, KVCacheSpec, LayerSpec
from nanofw.options import build_options

BLOCK_SIZES = (1, 3, 16, 256)
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=4, scale=0.5)


class KVCacheSuite:
    """What every KV cache must do.

    Class attributes a subclass sets:
        backend: the cache class.
        options: its options, as a user would set them; the suite adds `block_size` where there is such an option.
        shares_prefixes: `match_prefix` may claim another request's blocks.
        device: where the storage lies.
    """

    backend: ClassVar[type[KVCache]]
    options: ClassVar[Mapping[str, Any]] = {}
    shares_prefixes: ClassVar[bool] = False
    device: ClassVar[str] = "cpu"

    max_examples: ClassVar[int] = 20
    steps: ClassVar[int] = 40
    phases: ClassVar[Sequence[Phase]] = tuple(Phase)

    @classmethod
    def build(cls, block_size: int = 16, num_blocks: int = 9, rows: int = 4, max_len: int = 64) -> KVCache:
        """A cache of `num_blocks` (the null block included); skips the test if its options refuse the block size."""
        given = dict(cls.options)
        if any(f.name == "block_size" for f in dataclasses.fields(cls.backend.Options)):
            given["block_size"] = block_size
        try:
            options = build_options(cls.backend.Options, given, cls.backend.__name__)
        except ConfigError as error:
            pytest.skip(str(error))
        spec = KVCacheSpec((LAYER, LAYER), num_blocks, rows, max_len, torch.float32, torch.device(cls.device))
        if cls.backend.block_slots(spec, options) != block_size:
            pytest.skip(f"{cls.backend.__name__} has blocks of {cls.backend.block_slots(spec, options)} slots only")
        return cls.backend(spec, options)

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

    @pytest.mark.parametrize("block_size", BLOCK_SIZES, ids="bs{}".format)
    def test_conservation(self, block_size: int) -> None:
        """Random lives of requests against a model: no block lost, none owned twice, no content changed by others.

        Sources: vllm#10583 siblings (jjang-ai/vmlx#68, references never given back), nano-vllm#144 and #208 (cached
        prefixes, blocks hit before they are filled), MinivLLM#77 (lengths that are multiples of the block size).
        """
        self.build(block_size)  # skip before Hypothesis starts, if at all

        # Made anew for each suite: Hypothesis refuses one test that several classes inherit (differing executors).
        machine = type(f"{type(self).__name__}Machine", (_Machine,), {"suite": type(self), "block_size": block_size})
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
        for k in range(1, 5):
            for length in range(max(k * block_size - 1, 1), k * block_size + 2):
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
            row, length = number % 4, 1 + number * 7 % 60
            tokens = [number % 3] * length
            cached = cache.match_prefix(row, tokens)
            assert 0 <= cached < length
            assert cache.allocate(np.array([row]), np.array([length]))
            if number % 5:  # every fifth is aborted before it was computed
                cache.commit(np.array([row]), np.array([length]), lambda _, known=tokens: known)  # type: ignore[misc]
            cache.free(row)
            cache.check_integrity()
        assert cache.free_blocks == start

    def test_growing_no_request_is_fine(self) -> None:
        """An empty step asks for nothing and gets it."""
        cache = self.build(16)
        assert cache.allocate(np.array([], dtype=np.int64), np.array([], dtype=np.int64))

    def test_storage_is_described_truly(self) -> None:
        """Layers, block table and bytes are what the contract says; memory starts finite, so a mask can hide it."""
        cache = self.build(16, num_blocks=9)
        assert [layer.index for layer in cache.layers] == [0, 1]
        assert all(layer.spec == LAYER and layer.block_size == cache.block_size == 16 for layer in cache.layers)
        assert cache.block_table.dtype == np.int32
        assert cache.block_table.shape[0] == 4
        assert (cache.block_table == NULL_BLOCK).all()
        tensors = [tensor for layer in cache.layers for tensor in (layer.key, layer.value)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        spec = KVCacheSpec((LAYER, LAYER), 9, 4, 64, torch.float32, torch.device(self.device))
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
        cache = self.build(4, num_blocks=9)
        rows = np.array([0, 1])
        for row, token in enumerate((1, 2)):
            cache.match_prefix(row, [token] * 8)
        assert cache.allocate(rows, np.array([8, 8]))
        cache.check_integrity()
        if damage == "stolen":
            cache.block_table[0, 1] = cache.block_table[1, 1]
        elif damage == "leaked":
            cache.block_table[0, 1] = NULL_BLOCK
        else:
            cache.block_table[0, 2] = max(set(range(1, 9)) - set(cache.block_table[:2].flat))
        with pytest.raises(AssertionError):
            cache.check_integrity()


def _block_size(backend: type[KVCache], size: int) -> dict[str, int]:
    return {"block_size": size} if any(f.name == "block_size" for f in dataclasses.fields(backend.Options)) else {}


def _mark(tokens: Sequence[int]) -> float:
    """A number, exact in float32, that stands for a whole prefix."""
    return float(zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes()) & 0xFFFFF) + 1.0


@dataclasses.dataclass(slots=True)
class _Life:
    """What the model knows of one request: its tokens, how many have room, are computed, are committed."""

    tokens: list[int]
    room: int = 0
    computed: int = 0
    committed: int = 0


class _Machine(RuleBasedStateMachine):
    """Requests that begin, grow, are computed in chunks, committed late (a step in flight), and leave at any time."""

    suite: ClassVar[type[KVCacheSuite]]
    block_size: ClassVar[int]
    rows = 4

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, _Life] = {}

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.max_len = 5 * self.block_size
        self.cache = self.suite.build(self.block_size, num_blocks, self.rows, self.max_len)
        self.all_free = self.cache.free_blocks
        assert self.all_free == num_blocks - 1

    @precondition(lambda self: len(self.live) < self.rows)
    @rule(data=st.data(), family=st.integers(0, 1))
    def begin(self, data: st.DataObject, family: int) -> None:
        """A request whose prompt shares a prefix with others of its family."""
        row = data.draw(st.sampled_from(sorted(set(range(self.rows)) - set(self.live))), "row")
        edge = data.draw(st.sampled_from((1, self.block_size, 2 * self.block_size, 3 * self.block_size)), "edge")
        length = min(max(edge + data.draw(st.integers(-1, 1), "beside it"), 1), self.max_len - 1)
        tokens = [family] * length
        if data.draw(st.booleans(), "own ending"):
            tokens[-1] = 100 + row
        cached = self.cache.match_prefix(row, tokens)
        assert 0 <= cached <= length - 1, f"{cached} of {length} tokens cached: the last must be computed"
        assert self.suite.shares_prefixes or cached == 0, "a cache that shares nothing has nothing cached"
        self.live[row] = _Life(tokens, cached, cached, cached)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """Some rows ask for more; then what they got is computed."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, unique=True), "rows")
        lengths = []
        for row in rows:
            life = self.live[row]
            more = data.draw(st.integers(1, max(len(life.tokens) - life.computed, 1)), "more")
            lengths.append(min(life.computed + more, self.max_len))
        cache, before, free = self.cache, self.cache.block_table.copy(), self.cache.free_blocks
        held = np.count_nonzero(before, axis=1)
        lacking = sum(max(cache.blocks_for(n) - int(held[r]), 0) for r, n in zip(rows, lengths, strict=True))
        granted = cache.allocate(np.array(rows), np.array(lengths))
        others = [r for r in range(self.rows) if not (granted and r in rows)]
        assert np.array_equal(before[others], cache.block_table[others]), "a row that asked for nothing was changed"
        if not granted:
            assert cache.free_blocks == free, "refused, and yet blocks are gone"
            spare = len(rows) if self.suite.shares_prefixes else 0  # a shared last block may have to be copied
            assert lacking + spare > free, f"{lacking} blocks refused although {free} are free"
            return
        assert lacking <= free
        for row, length in zip(rows, lengths, strict=True):
            life = self.live[row]
            life.tokens += [row] * (length - len(life.tokens))
            life.room = max(life.room, length)
            for position in range(life.computed, length):
                self.suite.write(cache, row, position, _mark(life.tokens[: position + 1]))
            life.computed = length

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """What was computed becomes visible, perhaps a step later than it was computed."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, unique=True), "rows")
        lengths = [data.draw(st.integers(self.live[r].committed, self.live[r].computed), "to") for r in rows]
        kept = [(r, n) for r, n in zip(rows, lengths, strict=True) if n > 0]
        if kept:
            tokens_of: Callable[[int], Sequence[int]] = lambda row: self.live[row].tokens  # noqa: E731
            self.cache.commit(np.array([r for r, _ in kept]), np.array([n for _, n in kept]), tokens_of)
        for row, length in kept:
            self.live[row].committed = length

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """It ends, is aborted or is preempted, whatever it was doing."""
        row = data.draw(st.sampled_from(sorted(self.live)), "row")
        self.cache.free(row)
        del self.live[row]
        assert (self.cache.block_table[row] == NULL_BLOCK).all()

    @invariant()
    def nothing_is_lost(self) -> None:
        """Free + owned == all; tables are whole."""
        cache, table = self.cache, self.cache.block_table
        cache.check_integrity()
        owned = table[table != NULL_BLOCK]
        assert ((owned > 0) & (owned < cache.num_blocks)).all(), "a block that is not in the pool"
        distinct = np.unique(owned)
        assert self.suite.shares_prefixes or len(distinct) == len(owned), "a block is owned twice"
        assert cache.free_blocks + len(distinct) == self.all_free, "blocks are lost"
        for row in range(self.rows):
            room = self.live[row].room if row in self.live else 0
            held = np.count_nonzero(table[row])
            assert held >= cache.blocks_for(room)
            assert (table[row, held:] == NULL_BLOCK).all(), "the null block lies between owned ones"

    @invariant()
    def contents_stay(self) -> None:
        """Each token's slot still holds the mark of its own prefix."""
        for row, life in self.live.items():
            for position in {0, life.computed // 2, *range(max(life.computed - 3, 0), life.computed)}:
                if position < life.computed:
                    expected = _mark(life.tokens[: position + 1])
                    assert self.suite.read(self.cache, row, position) == expected, f"row {row}, token {position}"

    def teardown(self) -> None:
        """When all have left, all is free."""
        for row in list(self.live):
            self.cache.free(row)
        if hasattr(self, "cache"):
            assert self.cache.free_blocks == self.all_free
            self.cache.check_integrity()
