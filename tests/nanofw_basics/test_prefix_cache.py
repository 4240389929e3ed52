"""The prefix cache: the shipped suite, what is found again and what is forgotten."""

import numpy as np
import pytest

from nanofw import PluginHost, SamplingParams
from nanofw.testing.audited import audited_engine, audited_steps, prompt
from nanofw.testing.kv_cache_suite import KVCacheSuite
from nanofw.testing.ledger import Ledger
from nanofw_basics.block_index import BlockIndex
from nanofw_basics.continuous import PASSED_OVER
from nanofw_basics.prefix_cache import PrefixKVCache


class TestPrefixKVCache(KVCacheSuite):
    backend = PrefixKVCache
    shares_prefixes = True


def held(cache, row, tokens):
    """A request whose tokens are computed and committed."""
    cached = cache.match_prefix(row, tokens)
    assert cache.allocate(np.array([row]), np.array([len(tokens)]))
    cache.commit(np.array([row]), np.array([len(tokens)]), lambda _: tokens)
    return cached


def begin(cache, row, tokens):
    """Cached tokens of a request that leaves at once."""
    cached = cache.match_prefix(row, tokens)
    cache.free(row)
    return cached


A, B, C = ([digit] * 4 for digit in (1, 2, 3))


@pytest.fixture
def cache():
    """Eight blocks of four slots."""
    return TestPrefixKVCache.build(4, num_blocks=9)


@pytest.mark.parametrize("running", [True, False])
def test_what_is_found_again(cache, running):
    """Whole blocks from the beginning, of a request that runs or has gone; never the last token."""
    held(cache, 0, A + B + C)
    if not running:
        cache.free(0)
    cases = [(A + B + C + [9], 12), (A + B + C, 8), (A + B + [3], 8), (A + B, 4), (A, 0), (A + C + B, 4), (B + C, 0)]
    cases += [([*A, 2, 2, 2, 9], 4), ([9], 0)]
    for tokens, expected in cases:
        assert begin(cache, 1, tokens) == expected, tokens


def test_nothing_is_found_before_it_is_computed(cache):
    cache.match_prefix(0, A + B)
    cache.allocate(np.array([0]), np.array([8]))
    assert begin(cache, 1, A + B + C) == 0
    cache.commit(np.array([0]), np.array([5]), lambda _: A + B)
    assert begin(cache, 1, A + B + C) == 4
    cache.commit(np.array([0]), np.array([8]), lambda _: A + B)
    assert begin(cache, 1, A + B + C) == 8


def test_what_is_worth_waiting_for(cache):
    """A block that a row before it fills right now, in chunks too; not once it can be found, or will never come."""

    def waits(tokens):
        cache.match_prefix(1, tokens)
        found = cache.worth_waiting(1)
        cache.free(1)
        return found

    cache.match_prefix(0, A + B + C + [9])
    assert not cache.worth_waiting(0)
    assert [waits([*A, 1]), waits(A + C + [1]), waits(A), waits([*B, 1])] == [True, True, False, False]
    cache.allocate(np.array([0]), np.array([8]))
    assert waits([*A, 1])
    cache.commit(np.array([0]), np.array([4]), lambda _: A + B + C + [9])
    assert [waits([*A, 1]), waits(A + C + [1]), waits(A + B + [1])] == [False, False, True]
    cache.commit(np.array([0]), np.array([8]), lambda _: A + B + C + [9])
    assert [waits(A + B + [1]), waits(A + B + C + [1])] == [False, True]
    cache.free(0)
    assert not waits(A + B + C + [1])
    cache.check_integrity()


def test_the_second_of_twins_takes_over_when_the_first_is_gone(cache):
    """Both were let in; the first is aborted, and a third waits for nobody rather than for ever."""
    for row in (0, 1):
        cache.match_prefix(row, A + B)
    assert [cache.worth_waiting(row) for row in (0, 1)] == [False, True]
    cache.free(0)
    assert not cache.worth_waiting(1)
    cache.match_prefix(2, A + B)
    assert not cache.worth_waiting(2)


def test_what_is_kept_when_a_step_breaks_off(cache):
    """What had been committed; the end of a chain is given up before its beginning."""
    held(cache, 0, A + B + C)
    cache.match_prefix(1, A + B + [7] * 4)
    cache.allocate(np.array([1]), np.array([12]))
    cache.recover()
    cache.check_integrity()
    assert cache.free_blocks == 8
    assert [begin(cache, 1, A + B + C + [1]), begin(cache, 1, A + B + [7] * 5)] == [12, 8]
    cache.recover()
    held(cache, 0, [7] * 26)  # five blocks that hold nothing, and two more
    assert begin(cache, 1, A + B + C + [1]) == 4
    cache.clear()
    assert begin(cache, 1, A + B + C + [1]) == 0
    cache.check_integrity()


def test_shared_blocks_are_the_same_blocks(cache):
    held(cache, 0, A + B + [5])
    assert held(cache, 1, A + B + [6]) == 8
    assert cache.block_table[0, :2].tolist() == cache.block_table[1, :2].tolist()
    assert cache.block_table[0, 2] != cache.block_table[1, 2]
    assert cache.free_blocks == 8 - 4
    cache.free(0)
    assert cache.free_blocks == 8 - 3, "two are still held"


def test_twins_computed_at_once(cache):
    """Both compute the same blocks; one pair is published, and a third request finds it whoever leaves first."""
    for row in (0, 1):
        cache.match_prefix(row, A + B)
        cache.allocate(np.array([row]), np.array([8]))
    cache.commit(np.array([0, 1]), np.array([8, 8]), lambda _: A + B)
    assert not set(cache.block_table[0, :2]) & set(cache.block_table[1, :2])
    cache.free(0)
    assert held(cache, 2, A + B + C) == 8
    cache.free(1)
    assert begin(cache, 1, A + B + C) == 8
    cache.check_integrity()


def test_a_fork_of_blocks_whose_beginning_was_forgotten(cache):
    """Block B of the source was published after a twin of its block A, which is gone: it is not published again."""
    held(cache, 0, A)
    cache.match_prefix(1, A)
    cache.allocate(np.array([1]), np.array([9]))
    cache.commit(np.array([1]), np.array([8]), lambda _: A + B)  # A is the twin's, B is its own
    cache.free(0)
    held(cache, 0, [7] * 20)
    cache.free(0)  # the twin's A was needed
    assert cache.match_prefix(2, A + B + C) == 0
    cache.free(2)
    assert cache.fork(1, 2, 8) == 8
    assert cache.allocate(np.array([2]), np.array([12]))
    cache.commit(np.array([2]), np.array([12]), lambda _: A + B + C)
    cache.check_integrity()
    assert begin(cache, 3, [*A, 1]) == 4
    cache.free(1)
    cache.free(2)
    held(cache, 0, [7] * 32)
    cache.check_integrity()


def test_the_least_recently_used_is_forgotten_first(cache):
    """And of one request the last block before the first, so that what is left can still be found."""
    held(cache, 0, A + B)
    cache.free(0)
    held(cache, 0, C + A)
    cache.free(0)
    assert begin(cache, 0, A + B + [9]) == 8  # used again: now C + A is the oldest
    fresh = [7] * 20
    held(cache, 0, fresh)  # five blocks: four that never held anything, and one more
    assert begin(cache, 1, C + A + [9]) == 4
    assert begin(cache, 1, A + B + [9]) == 8


def test_unpublished_blocks_are_used_before_published_ones(cache):
    held(cache, 0, A + B + C + A + B + C + A)  # seven blocks, and one is free
    cache.free(0)
    held(cache, 0, [8, 8])
    cache.free(0)
    held(cache, 0, [9, 9])
    assert begin(cache, 1, A + B + C + A + B + C + A + [1]) == 28


def test_colliding_hashes_do_no_harm(monkeypatch):
    """All in one bucket: found by comparing tokens and what came before them."""
    monkeypatch.setattr(BlockIndex, "_bucket", lambda self, parent, tokens: 0)
    TestPrefixKVCache().test_conservation(3)
    cache = TestPrefixKVCache.build(4, num_blocks=9)
    held(cache, 0, A + B)
    held(cache, 1, C + B)
    assert begin(cache, 2, A + B + [1]) == 8
    assert begin(cache, 2, C + B + [1]) == 8
    assert begin(cache, 2, B + A + [1]) == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [2048, 24])
def test_a_common_prefix_is_computed_once(budget, depth):
    """Of sixteen requests at once fifteen wait for what the first computes; one that begins otherwise does not."""
    host = PluginHost.load(only=("basics", "gather"))
    engine = audited_engine(host, kv_cache="prefix", max_batch_tokens=budget, steps_in_flight=depth)
    book = Ledger(engine)
    how = SamplingParams(temperature=0, max_tokens=1)
    for number in range(16):
        book.add(f"{number}", prompt(64, 0) + prompt(3, number), how)
    book.add("another", prompt(20, 1), how)
    book.finish(bound=40)
    steps = audited_steps(engine)
    assert sum(step.num_tokens for step in steps) == 64 + 16 * 3 + 20
    if budget == 2048:
        assert steps[0].query_lens.tolist() == [67, 20]


def test_a_step_passes_over_so_many_and_no_more():
    """However many wait for a prefix, a step looks at a bounded number of them."""
    engine = audited_engine(PluginHost.load(only=("basics", "gather")), kv_cache="prefix", kv_blocks=200)
    book, looked = Ledger(engine), []
    match = engine.kv_cache.match_prefix
    engine.kv_cache.match_prefix = lambda row, tokens: looked.append(row) or match(row, tokens)
    for number in range(3 * PASSED_OVER):
        book.add(f"{number}", [*prompt(40, 0), number], SamplingParams(temperature=0, max_tokens=1))
    book.step()
    assert len(looked) == 1 + PASSED_OVER
    book.finish(bound=9)


def test_who_waits_goes_on_when_the_first_is_aborted():
    """Part-way through the common prompt; what it had computed is found."""
    host = PluginHost.load(only=("basics", "gather"))
    engine = audited_engine(host, kv_cache="prefix", max_batch_tokens=32)
    book = Ledger(engine)
    for name in ("first", "second"):
        book.add(name, prompt(80, 0), SamplingParams(temperature=0, max_tokens=1))
    book.step()
    book.abort("first")
    book.finish(bound=9)
    assert [step.query_lens.tolist() for step in audited_steps(engine)] == [[32], [32], [16]]


@pytest.mark.parametrize("depth", [0, 1])
def test_cached_tokens_are_reported(llm, depth):
    """With a real model: the same tokens as without a cache, and the hit in the output. Of twins one computes."""
    prompts = [[7] * 40 + [n] for n in range(4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain, cached = llm(), llm(kv_cache="prefix", steps_in_flight=depth)
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    for hits in ([0, 32, 32, 32], [32] * 4):
        outputs = cached.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        assert [o.cached_tokens for o in outputs] == hits
