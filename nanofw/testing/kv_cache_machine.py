"""Random lives of requests in a KV cache, against a plain model of what it should hold."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanofw.batch import NULL_BLOCK

if TYPE_CHECKING:
    from nanofw.testing.kv_cache_suite import KVCacheSuite


def _mark(tokens: Sequence[int]) -> float:
    """A number, exact in float32, that stands for a whole prefix."""
    return float(zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes()) & 0xFFFFF) + 1.0


@dataclass(slots=True)
class _Life:
    """What the model knows of one request: its tokens, how many have room, are computed, are committed."""

    tokens: list[int]
    room: int = 0
    computed: int = 0
    committed: int = 0


class KVCacheMachine(RuleBasedStateMachine):
    """Requests that begin, grow, are computed late and in chunks, committed later still, and leave at any time."""

    suite: ClassVar[type[KVCacheSuite]]
    block_size: ClassVar[int]
    rows = 4

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, _Life] = {}

    @initialize(num_blocks=st.integers(2, 8))
    def start(self, num_blocks: int) -> None:
        """An empty cache."""
        self.max_len = min(5, self.suite.max_blocks) * self.block_size
        self.cache = self.suite.build(self.block_size, num_blocks, self.rows, self.max_len)
        self.all_free = self.cache.free_blocks
        assert self.all_free == num_blocks - 1

    @precondition(lambda self: len(self.live) < self.rows)
    @rule(data=st.data(), family=st.integers(0, 1))
    def begin(self, data: st.DataObject, family: int) -> None:
        """A request whose prompt shares a prefix with others of its family."""
        self._begin(data, family)

    @precondition(lambda self: len(self.live) < self.rows)
    @rule(data=st.data(), several=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=3))
    def live_through(self, data: st.DataObject, several: list[tuple[int, bool]]) -> None:
        """Requests that are there and gone between two moments of the others, one after another."""
        for family, committed in several:
            row = self._begin(data, family)
            life = self.live[row]
            if self.cache.allocate(np.array([row]), np.array([len(life.tokens)])):
                life.room = len(life.tokens)
                self._compute(row)
                if committed:
                    self._commit([row], [life.computed])
            self._leave(row)

    def _begin(self, data: st.DataObject, family: int) -> int:
        row = data.draw(st.sampled_from(sorted(set(range(self.rows)) - set(self.live))), "row")
        edge = data.draw(st.sampled_from((1, self.block_size, 2 * self.block_size, 3 * self.block_size)), "edge")
        length = max(min(edge + data.draw(st.integers(-1, 1), "beside it"), self.max_len - 1), 1)
        tokens = [family] * length
        if data.draw(st.booleans(), "own ending"):
            tokens[-1] = 100 + row
        cached = self.cache.match_prefix(row, tokens)
        assert 0 <= cached <= length - 1, f"{cached} of {length} tokens cached: the last must be computed"
        assert self.suite.shares_prefixes or cached == 0, "a cache that shares nothing has nothing cached"
        if self.cache.worth_waiting(row):
            end = cached + self.block_size
            others = [other.tokens for other in self.live.values() if other.committed < end]
            assert tokens[:end] in [other[:end] for other in others], "waits for a block that nobody is about to commit"
        self.live[row] = _Life(tokens, cached, cached, cached)
        return row

    @precondition(lambda self: self.live and len(self.live) < self.rows)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A request that goes on from a part of another one; each writes its own tokens from there."""
        source = data.draw(st.sampled_from(sorted(self.live)), "source")
        row = data.draw(st.sampled_from(sorted(set(range(self.rows)) - set(self.live))), "row")
        if not self.live[source].computed:
            return
        length = data.draw(st.integers(1, self.live[source].computed), "length")
        free = self.cache.free_blocks
        shared = self.cache.fork(source, row, length)
        assert shared in (0, length)
        assert self.cache.free_blocks == free, "blocks are shared, not taken"
        assert shared or not self.cache.block_table[row].any(), "nothing is shared, and yet blocks are held"
        if shared:
            own = data.draw(st.integers(1, 2), "own tokens")
            tokens = self.live[source].tokens[:length] + [100 + row] * own
            self.live[row] = _Life(tokens[: self.max_len], length, length, 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """Some rows ask for more; what they got is computed now or later (a step in flight)."""
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
        if data.draw(st.booleans(), "at once"):
            for row in rows:
                self._compute(row)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """What has room gets its keys and values."""
        self._compute(data.draw(st.sampled_from(sorted(self.live)), "row"))

    def _compute(self, row: int) -> None:
        life = self.live[row]
        for position in range(life.computed, life.room):
            self.suite.write(self.cache, row, position, _mark(life.tokens[: position + 1]))
        life.computed = life.room

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """What was computed becomes visible, perhaps a step later than it was computed."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, unique=True), "rows")
        lengths = [data.draw(st.integers(self.live[r].committed, self.live[r].computed), "to") for r in rows]
        self._commit(rows, lengths)

    def _commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
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
        self._leave(data.draw(st.sampled_from(sorted(self.live)), "row"))

    def _leave(self, row: int) -> None:
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
