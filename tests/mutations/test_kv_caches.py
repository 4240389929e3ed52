"""Faults of bookkeeping, planted into the caches of this repository: the suite must find each, and say why."""

import numpy as np
import pytest
from hypothesis import Phase

from nanofw.testing import KVCacheSuite
from nanofw.testing.audited import audited_engine, host_with
from nanofw.testing.planted import Faults, failure
from nanofw.testing.soak import Soak
from nanofw_basics.paged_cache import PagedKVCache
from nanofw_basics.prefix_cache import PrefixKVCache

SEARCH = {"phases": (Phase.generate,), "max_examples": 2000}
"""Random lives go on until they find something, and it is not made smaller."""

paged = Faults(KVCacheSuite, **SEARCH)
prefix = Faults(KVCacheSuite, shares_prefixes=True, **SEARCH)


class Blind:
    """Its own check finds nothing: the suite must see for itself."""

    def check_integrity(self):
        pass


@paged.plant("test_conservation[bs3]", "blocks are lost")
class LosesABlock(Blind, PagedKVCache):
    """Gives back one block too few."""

    def free(self, row):
        if self._held[row] > 2:
            self._held[row] -= 1
            self.block_table[row, self._held[row]] = 0
        super().free(row)


@paged.plant("test_200_requests_give_everything_back", "assert .*allocate")
class KeepsWhatWasAborted(Blind, PagedKVCache):
    """References of requests that were never computed stay (jjang-ai/vmlx#68)."""

    def commit(self, rows, lengths, tokens_of):
        self.computed = set(rows.tolist())

    def free(self, row):
        if row not in getattr(self, "computed", ()):
            self.block_table[row] = self._held[row] = self._room[row] = 0
        super().free(row)
        self.computed = set()


@paged.plant("test_conservation[bs1]", "a row that asked for nothing was changed")
@paged.plant("test_allocation_is_all_or_nothing", "assert 2 == 4")
class GrantsInPart(PagedKVCache):
    """Takes what there is, then reports failure."""

    def allocate(self, rows, lengths):
        return super().allocate(rows, lengths) or (super().allocate(rows[:1], lengths[:1]) and False)


@paged.plant("test_conservation[bs3]", "blocks are lost")
class HandsOutTwice(Blind, PagedKVCache):
    """A block that was just given back is put on the stack a second time."""

    def free(self, row):
        first = self.block_table[row, 0]
        super().free(row)
        if first and self._num_free < len(self._free):
            self._free[self._num_free] = first
            self._num_free += 1


@paged.plant("test_conservation[bs3]", "blocks lost or owned twice")
class HandsOutNull(PagedKVCache):
    """Counts the null block among the free ones."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self._free[0] = 0


@paged.plant("test_conservation[bs3]", "assert np.False_")
class ForgetsTails(Blind, PagedKVCache):
    """Leaves the names of blocks in the table of a request that has gone."""

    def free(self, row):
        before = self.block_table[row].copy()
        super().free(row)
        self.block_table[row] = before


@paged.plant("test_lengths_at_block_edges[bs3]", "2 tokens.*assert np.int64.0. == 1")
class RoundsDown(PagedKVCache):
    """Has no block for the last, partly filled one."""

    def allocate(self, rows, lengths):
        return super().allocate(rows, lengths - lengths % self.block_size)


@paged.plant("test_lengths_at_block_edges[bs3]", "3 tokens.*assert np.int64.2. == 1")
class TakesASpareBlock(PagedKVCache):
    """One block more at each multiple of the block size (MinivLLM#77)."""

    def allocate(self, rows, lengths):
        return super().allocate(rows, lengths + 1)


@paged.plant("test_check_integrity_finds*", "DID NOT RAISE")
class ChecksNothing(Blind, PagedKVCache):
    pass


@prefix.plant("test_conservation[bs1]", "1 of 1 tokens cached: the last must be computed")
@prefix.plant("test_prompts_sent_again*", "assert|Error")
class FindsWholePrompts(PrefixKVCache):
    """Nothing is left to compute (nano-vllm#144)."""

    def match_prefix(self, row, token_ids):
        return super().match_prefix(row, [*token_ids, 0])


@prefix.plant("test_conservation[bs1]", "row ., token")
class PublishesWhenAllocated(PrefixKVCache):
    """Publishes blocks when they are handed out, before anything is in them (nano-vllm#208)."""

    def __init__(self, spec, options):
        self.tokens = {}
        super().__init__(spec, options)

    def match_prefix(self, row, token_ids):
        self.tokens[row] = list(token_ids)
        return super().match_prefix(row, token_ids)

    def allocate(self, rows, lengths):
        granted = super().allocate(rows, self.room(rows, lengths))
        if granted:
            prompts = np.array([len(self.tokens[row]) for row in rows.tolist()], dtype=np.int64)
            super().commit(rows, np.minimum(self.room(rows, lengths), prompts), self.tokens.__getitem__)
        return granted

    def room(self, rows, lengths):
        return lengths


@prefix.plant("test_aborted_part_way_through_its_prompt[0]", "assert")
class PublishesWholePrompts(PublishesWhenAllocated):
    """Allocates and publishes a whole prompt with its first chunk."""

    def room(self, rows, lengths):
        return np.maximum(lengths, [len(self.tokens[row]) for row in rows.tolist()])


@prefix.plant("test_conservation[bs1]", "row ., token")
class IgnoresTheBeginning(PrefixKVCache):
    """Finds a block by its own tokens, whatever came before them."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        publish, find = self._index.publish, self._index.find
        self._index.publish = lambda block, parent, tokens: publish(block, 0, tokens)
        self._index.find = lambda parent, tokens: find(0, tokens)


@prefix.plant("test_conservation[bs3]", "row ., token")
class TrustsHashes(Blind, PrefixKVCache):
    """All hashes collide, and tokens are not compared: of the blocks after the right one it takes the first."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self._index._bucket = lambda parent, content: 0
        self._index._find = self.first

    def first(self, bucket, parent, content):
        block = self._index._buckets[bucket]
        while block and self._index._parent[block] != parent:
            block = self._index._chain[block]
        return block


@prefix.plant("test_a_fork_and_its_source_write_apart[bs3]", "row . of .* reads what the other one wrote")
class WritesIntoShared(PrefixKVCache):
    """A fork writes into the block it shares, and makes no copy."""

    def fork(self, source, row, length):
        super().fork(source, row, length)
        self._borrowed[row] = False
        self._room[row] = self._held[row] * self.block_size
        return length


@prefix.plant("test_conservation[bs3]", "waits for a block that nobody is about to commit")
class WaitsForEver(PrefixKVCache):
    """Still waits for a block when the request that was to fill it has gone."""

    def free(self, row):
        key = self._next[row]
        super().free(row)
        if key is not None:
            self._filling[key] = -1


@prefix.plant("test_recover", "found what had never been committed|AssertionError")
class RemembersTooMuch(PrefixKVCache):
    """After a step that broke off, takes what was never computed for published."""

    def recover(self):
        for block in self._owners.nonzero()[0].tolist():
            self._index.publish(block, self._index.serial(block - 1), np.full(4, 5, dtype=np.int32))
        super().recover()


@prefix.plant("test_bookkeeping_is_small", "assert .* <= 64")
class KeepsEveryKey(PrefixKVCache):
    """Keeps the tokens of each block a second time, as Python objects."""

    def commit(self, rows, lengths, tokens_of):
        self.kept = [*getattr(self, "kept", ()), *(tuple(str(t) for t in tokens_of(int(row))) for row in rows)]
        super().commit(rows, lengths, tokens_of)


@prefix.plant("test_memory_does_not_grow", "objects are left of each request")
class KeepsEveryHit(PrefixKVCache):
    """Writes down what each request has found."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self.hits = []

    def match_prefix(self, row, token_ids):
        found = super().match_prefix(row, token_ids)
        self.hits.append((row, found))
        return found


@pytest.mark.parametrize("fault", [*paged, *prefix], ids=str)
def test_is_found(fault):
    fault.must_be_found()


class FindsReused(PrefixKVCache):
    """Forgets what a block held when it is filled again, not when it is handed out."""

    def __init__(self, spec, options):
        super().__init__(spec, options)
        self.stale, self.drop = [], self._index.drop
        self._index.drop = self.stale.append

    def commit(self, rows, lengths, tokens_of):
        while self.stale:
            self.drop(self.stale.pop())
        super().commit(rows, lengths, tokens_of)


class FreesShared(Blind, PrefixKVCache):
    """Puts a block into the queue although another request holds it."""

    def match_prefix(self, row, token_ids):
        found = super().match_prefix(row, token_ids)
        self._owners[self.block_table[row, : self._held[row]]] = 1
        return found


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (FindsReused, "request 8: wrong tokens"),
        (FreesShared, "request 1: wrong tokens"),
        (WritesIntoShared, "two tokens share a slot"),
    ],
)
def test_a_soak_finds(fault, reason):
    """In a crowded pool, where blocks are handed out again and again."""
    settings = {"kv_blocks": 16, "max_num_seqs": 6, "options": {"kv_cache": {"block_size": 4}}}
    engine = audited_engine(host_with("kv_cache", fault), kv_cache="under-test", **settings)
    assert reason in (failure(lambda: Soak(engine).run(5000)) or "nothing found")
