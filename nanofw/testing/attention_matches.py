"""Attention against the reference, within the yardstick: head sizes, ratios, chunks, blocks, drawn batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hypothesis

from nanofw.testing.attention_base import AttentionBase, compare, run
from nanofw.testing.cases import DTYPES, Case, Dense, drawn_cases, dtype_names, pick, spread
from nanofw.testing.guard import Guarded
from nanofw.testing.layout import Layout, fetch, lay_out, pools
from nanofw.testing.suite import cases, drawn
from nanofw.testing.tolerance import check_same_bits

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
CANARY = -11.0


def head_sizes(suite: type[AttentionBase]) -> Iterator[Case]:
    """Each dtype and head size, 8 query heads on 2, contexts around the edge of a block."""
    block = suite.block()
    contexts = (1, block - 1, block, block + 1, 6 * block + 1) if block > 2 else (1, 2, 7)
    sizes = dict.fromkeys((*HEAD_SIZES, *spread(suite.can().head_sizes)))
    for dtype in DTYPES:
        for size in sizes:
            yield suite.case(contexts, dtype=dtype, head_size=size, seed=size)


def ratios(suite: type[AttentionBase]) -> Iterator[Case]:
    """Query heads to key/value heads: the usual ratios, 1, and odd ones."""
    block = suite.block()
    for heads, kv_heads in ((1, 1), (4, 4), (3, 1), (6, 2), (7, 1), (14, 2), (16, 2), (32, 2)):
        yield suite.case((1, block, 2 * block + 3), (1, 1, 5), heads=heads, kv_heads=kv_heads, seed=heads)


def block_sizes(suite: type[AttentionBase]) -> Iterator[Case]:
    """Lengths that are exact multiples of the block, where a last block's token count came out as 0 (MinivLLM#77)."""
    for block in dict.fromkeys((1, 3, 8, 16, 32, *(suite.can().block_sizes or ()))):
        yield suite.case(tuple(k * block for k in (1, 2, 3, 4)), block_size=block)


def profiles(suite: type[AttentionBase]) -> Iterator[Case]:
    """Numbers that hide faults or provoke them: sharp and flat softmax, tiny values, energy in the upper half."""
    block = suite.block()
    for dtype in dtype_names(suite.can()):
        for profile in ("sharp", "tiny", "upper"):
            case = suite.case((block + 1, 3 * block, 70), (1, 1, 9), dtype=dtype, seed=3)
            yield replace(case, profile=profile, head_size=pick(suite.can().head_sizes, 128))


class Matches(AttentionBase):
    """The output is right."""

    @cases(head_sizes)
    def test_decode_matches(self, case: Case) -> None:
        """One query a request, each declared dtype and head size, contexts around the edge of a block.

        Fails for a key that is lost, a wrong scale, or head sizes that are no power of two, or whose upper half is left
        out. Sources: sglang#1281, triton#621.
        """
        self.check(case)
        self.check(replace(case, profile="upper"))

    @cases(head_sizes)
    def test_prefill_matches(self, case: Case) -> None:
        """Whole prompts: nothing is cached, every token is a query.

        Fails for a wrong mask, or if the requests of a batch see each other. Source: the contract.
        """
        self.check(replace(case, queries=case.contexts))

    @cases(head_sizes)
    def test_mixed_matches(self, case: Case) -> None:
        """Decode, a prompt's later chunk and a whole prompt in one batch, with padding behind them.

        Fails if a batch is taken to be all decode or all prefill, or if lengths of one request are used for another.
        Source: the contract.
        """
        queries = tuple(min(n, s) for n, s in zip((1, 7, 1, 1000, 20), case.contexts, strict=False))
        self.check(replace(case, queries=queries, padding=2))

    @cases(head_sizes)
    def test_writes_stay_inside(self, case: Case) -> None:
        """Canaries after each cache block and around each buffer survive.

        Fails if a head size is padded to a power of two and stored without a mask. Source: sglang#1281.
        """
        case = replace(case, queries=tuple(min(2, s) for s in case.contexts), padding=1)
        attention, dense = self.build(case.spec(self.torch_device())), self.numbers(case)
        problem = lay_out(case, dense, Layout(fill=CANARY, gap=24))
        before = [pool.clone() for pool in pools(problem.kv)]
        with Guarded() as guarded:
            out = run(attention, problem)
        guarded.check()
        compare(problem, dense, out)
        for name, pool, old in zip(("key", "value"), pools(problem.kv), before, strict=True):
            size = case.block_size * case.kv_heads * case.head_size
            check_same_bits(pool[:, size:], old[:, size:], f"{case}: canaries after each block of the {name} cache")

    @cases(ratios)
    def test_head_ratios_match(self, case: Case) -> None:
        """Each query head reads the key/value head that it belongs to.

        Fails if query head h reads another one than h // G. Source: grouped-query attention (Ainslie et al., EMNLP
        2023).
        """
        self.check(case)

    @cases(block_sizes)
    def test_full_blocks_match(self, case: Case) -> None:
        """Contexts of exactly 1 to 4 blocks, decode and prefill.

        Fails if a full last block counts as an empty one. Source: MinivLLM#77.
        """
        self.check(case)
        self.check(replace(case, queries=case.contexts))

    @cases(profiles)
    def test_profiles_match(self, case: Case) -> None:
        """Sharp, tiny and half-empty numbers.

        Fails if a softmax overflows, loses small scores, or sums only half of a head. Sources: triton#621; the running
        maximum of Milakov and Gimelshein, 2018.
        """
        self.check(case)

    def test_chunked_prefill_matches_one_shot(self) -> None:
        """A prompt in chunks, each reading what the earlier ones wrote, equals the reference.

        Fails if a chunk is masked as if it began the prompt, or does not see those before it. Source:
        transformers#41184.
        """
        block = self.block()
        self.check_chunks(self.case((2 * block + 12,)), (5, block, 1, block - 1, 7))

    def check_chunks(self, case: Case, chunks: tuple[int, ...]) -> None:
        """Run one request chunk by chunk in one cache that the backend alone fills."""
        attention, length = self.build(case.spec(self.torch_device())), sum(chunks)
        case = replace(case, contexts=(length,), queries=(length,))
        whole, seen = self.numbers(case), 0
        q, k, v = whole.q[0], whole.k[0], whole.v[0]
        empty = lay_out(case, whole, Layout(fill=9.0))
        for size in chunks:
            start, seen = seen, seen + size
            dense = Dense([q[start:seen]], [k[:seen]], [v[:seen]])
            problem = lay_out(replace(case, contexts=(seen,), queries=(size,)), dense, within=empty)
            compare(problem, dense, run(attention, problem))
            keys, values = fetch(problem.kv, problem.slots)
            check_same_bits(keys, k[start:seen], f"{case}: keys written for tokens {start} to {seen}")
            check_same_bits(values, v[start:seen], f"{case}: values written for tokens {start} to {seen}")

    def test_decoding_follows_prefill(self) -> None:
        """20 decode steps after a prompt, in one cache that the backend alone fills.

        Fails if prefill leaves K and V where decode does not look, or other ones. Source: the contract.
        """
        self.check_chunks(self.case((1,)), (self.block() + 1, *(1,) * 20))

    def test_strided_inputs_match(self) -> None:
        """Models hand over q, k and v as views: slices of one packed tensor, or with heads before tokens in memory.

        Fails if inputs are taken to be contiguous. Source: transformers hands over transposed views.
        """
        block = self.block()
        case = self.case((block + 1, 2 * block, 5), (1, 6, 5), padding=1)
        for inputs in ("packed", "heads-first"):
            self.check(case, layout=Layout(inputs=inputs))

    def test_loose_bounds_match(self) -> None:
        """`max_query_len` and `max_seq_len` are upper bounds: a graph's bucket declares more than the batch holds.

        Fails if a bound is used as a length. Source: the contract.
        """
        block = self.block()
        case = self.case((1, block, 3 * block + 1), (1, 1, 4))
        self.check(case, layout=Layout(slack=5 * block + 3, columns=2))
        self.check(replace(case, queries=None), layout=Layout(slack=5 * block + 3, columns=2))

    @drawn(lambda suite: drawn_cases(suite.can()))
    def test_any_case_matches(self, case: Case) -> None:
        """Whatever Hypothesis draws within the declared capabilities.

        Fails for a combination that no other check names, and prints the smallest one found. Source: the contract.
        """
        if self.backend.validate(case.spec(self.torch_device())):
            hypothesis.reject()
        self.check(case, layout=Layout(order=case.seed, fill=2.5, gap=8 * (case.seed % 2)))
