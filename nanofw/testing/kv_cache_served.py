"""KV caches inside a real engine: whatever is shared, put back or sent again, the tokens are those of a fresh run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nanofw.engine import Engine
from nanofw.kv_cache import PAGED_NHD
from nanofw.testing.audited import NAME, audited_engine, check, host_with, left_behind, prompt, run
from nanofw.testing.kv_cache_base import KVCacheBase

BLOCK_SIZE = 16


class KVCacheServed(KVCacheBase):
    """In an engine, with a model whose every token depends on all of its context, nobody reads what is another's."""

    @classmethod
    def engine(cls, tokens: int = 1024, **changes: Any) -> Engine:
        """An engine whose cache holds `tokens` tokens, in blocks of 16 slots where they can be chosen."""
        if cls.backend.layout != PAGED_NHD:
            pytest.skip(f"the model of this test reads the layout {PAGED_NHD}, not {cls.backend.layout}")
        sized = any(field.name == "block_size" for field in dataclasses.fields(cls.backend.Options))
        options = {**cls.options} | ({"block_size": BLOCK_SIZE} if sized else {})
        host = host_with("kv_cache", cls.backend)
        settings: dict[str, Any] = {
            "kv_cache": NAME,
            "device": cls.device,
            "max_model_len": 128,
            "options": {"kv_cache": options},
        }
        slots = BLOCK_SIZE if sized else audited_engine(host, **settings, kv_blocks=1).kv_cache.block_size
        return audited_engine(host, **settings, kv_blocks=max(tokens // slots, 1), **changes)

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("budget", [256, 8])
    def test_prompts_sent_again(self, budget: int, depth: int) -> None:
        """Each prompt three times, then twice in one step, in one piece and in chunks.

        Every run gives the tokens of the first; at most all but the last token of a prompt are reported as cached, and
        never fewer than the time before. Fails if a prompt that is cached whole leaves nothing to compute, or a hit
        breaks the chain of hashes. Sources: nano-vllm#144, vllm#11186.
        """
        engine = self.engine(max_batch_tokens=budget, steps_in_flight=depth)
        for length in (15, 16, 17, 32, 33):
            work = [(prompt(length, length), 6)]
            cached = []
            for batch in (work, work, work, work * 2):
                outputs = run(engine, batch)
                check(engine, batch, outputs)
                cached += [o.cached_tokens for o in outputs]
            assert max(cached) <= length - 1
            assert cached[0] == 0
            assert cached == sorted(cached), "a hit became shorter"
            if not self.shares_prefixes:
                assert not any(cached), "a cache that shares nothing reports cached tokens"
            else:
                size = engine.kv_cache.block_size
                assert cached[1] >= (length - 1) // size * size, "whole blocks of a prompt were not found again"

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("budget", [256, 24, 8])
    def test_common_prefix_in_one_step(self, budget: int, depth: int) -> None:
        """Requests of one step that begin alike: no block is read before it is filled.

        Fails if `match_prefix` finds what `commit` has not announced. Source: nano-vllm#208.
        """
        engine = self.engine(max_batch_tokens=budget, steps_in_flight=depth)
        common = prompt(40, 0)
        work = [(common + prompt(n, n), 8) for n in (1, 2, 8, 9, 24)] + [(common, 8), (common, 8), (common[:33], 8)]
        for _ in range(2):
            check(engine, work, run(engine, work))

    @pytest.mark.parametrize("depth", [0, 1])
    def test_put_back_with_a_common_prefix(self, depth: int) -> None:
        """A pool too small for all: requests are put back, and find their own and others' blocks again or not.

        Fails if a block is found by its old tokens after others have overwritten it. Source: the contract.
        """
        engine = self.engine(tokens=128, steps_in_flight=depth)
        common = prompt(20, 0)
        work = [(common + prompt(10 + n, n), 30) for n in range(4)]
        for _ in range(2):
            check(engine, work, run(engine, work))

    @pytest.mark.parametrize("depth", [0, 1])
    def test_aborted_part_way_through_its_prompt(self, depth: int) -> None:
        """What was not computed when a request was aborted is not found by the next one of the same prompt.

        Fails if blocks can be found from their allocation on. Source: nano-vllm#208.
        """
        work = [(prompt(60, 0), 8)]
        for steps in range(1, 8):
            engine = self.engine(max_batch_tokens=8, steps_in_flight=depth)
            engine.add("aborted", *work[0][:1])
            for _ in range(steps):
                engine.step()
            engine.abort("aborted")
            check(engine, work, run(engine, work))

    def test_200_served_requests_give_everything_back(self) -> None:
        """Of six families of prompts, in an engine; the pool is whole after them.

        Fails if a block that was shared is not given back by the last who holds it. Source: jjang-ai/vmlx#68.
        """
        engine = self.engine(tokens=256, max_num_seqs=8)
        work = [(prompt(40, i % 6)[: 1 + i * 7 % 40], 1 + i % 6) for i in range(200)]
        check(engine, work, run(engine, work))

    def test_memory_does_not_grow(self) -> None:
        """After some hundred requests, some hundred more leave nothing behind, not an object each.

        Fails if prompts, blocks or rows of requests that have gone are kept for ever. Source: the contract.
        """
        engine = self.engine(tokens=256, max_num_seqs=8)
        left = left_behind(engine, [(prompt(1 + i * 7 % 40, i), 1 + i % 6) for i in range(100)])
        assert left < 0.5, f"{left:.1f} objects are left of each request"
