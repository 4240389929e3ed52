"""How requests end: by a token, for want of room, aborted, or because a call broke off; nothing of them is left."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest

from nanofw.events import RequestFinished
from nanofw.request import SamplingParams
from nanofw.testing.audited import check, context_model, left_behind, nothing_left, prompt, run
from nanofw.testing.ledger import Ledger
from nanofw.testing.scheduler_base import SchedulerBase


class SchedulerEnds(SchedulerBase):
    """Whatever ends a request, the others go on, and nothing of it is left."""

    def test_stop_ids(self) -> None:
        """An end learned from a token's value, a step late at depth 1, gives the same tokens and no more.

        Fails if a request that has ended is scheduled again, or its row goes on to another too early. Source: the
        contract.
        """
        prompts = [prompt(6, i) for i in range(6)]
        expected = [context_model().greedy(p, 30) for p in prompts]
        stop = tuple({tokens[7] for tokens in expected})
        for depth in (0, 1):
            engine = self.engine(stop, steps_in_flight=depth, max_num_seqs=3)
            outputs = run(engine, [(p, 30) for p in prompts])
            for output, tokens in zip(outputs, expected, strict=True):
                end = next(i for i, t in enumerate(tokens) if t in stop)
                assert list(output.outputs[0].token_ids) == tokens[: end + 1]
                assert output.outputs[0].finish_reason == "stop"
            nothing_left(engine)

    def test_small_request_passes_after_a_full_pool(self) -> None:
        """A request that fills the whole pool ends as "kv_capacity", and the next one runs.

        Fails if what can never fit is waited for, and blocks all behind it. Source: vllm#39734.
        """
        engine = self.engine(kv_blocks=8)
        work = [(prompt(100, 0), 100), (prompt(10, 1), 5)]
        outputs = run(engine, work)
        assert outputs[0].outputs[0].finish_reason == "kv_capacity"
        assert len(outputs[0].outputs[0].token_ids) == 8 * 16 + 1 - 100
        assert outputs[1].outputs[0].finish_reason == "length"
        check(engine, work, outputs)

    @pytest.mark.parametrize("depth", [0, 1])
    def test_abort_at_any_moment(self, depth: int) -> None:
        """Waiting, part-way through its prompt, decoding, put back: aborted there, it leaves nothing behind.

        Fails if it is scheduled again, or keeps its row or blocks. Source: jjang-ai/vmlx#68.
        """
        for moment in range(24):
            engine = self.engine(
                kv_blocks=6,
                max_batch_tokens=8,
                steps_in_flight=depth,
                options={"kv_cache": {"block_size": 4}},
            )
            work = [(prompt(9 + i, i), 8) for i in range(3)]
            for i, (tokens, count) in enumerate(work):
                engine.add(str(i), tokens, SamplingParams(temperature=0, max_tokens=count))
            for _ in range(moment):
                engine.step()
            aborted = engine.abort("1")
            assert engine.abort("1") is None, "aborted twice"
            assert engine.abort("nobody") is None
            rest = {o.request_id: o for o in engine.run() if o.finished}
            for i in (0, 2):
                if str(i) in rest:
                    assert list(rest[str(i)].outputs[0].token_ids) == context_model().greedy(*work[i])
            if aborted is not None:
                assert aborted.outputs[0].finish_reason == "abort"
                tokens = list(aborted.outputs[0].token_ids)
                assert tokens == context_model().greedy(*work[1])[: len(tokens)]
            nothing_left(engine)

    @pytest.mark.parametrize("depth", [0, 1])
    def test_abort_from_an_observer(self, depth: int) -> None:
        """At the end of each request another one is aborted, in the middle of a step that computes it.

        Fails if a list changes while it is walked, or a request is forgotten twice. Source: observers may abort
        (`nanofw_request_finished`).
        """
        engine = self.engine(kv_blocks=16, steps_in_flight=depth, options={"kv_cache": {"block_size": 4}})
        book = Ledger(engine)

        def abort_another(*, event: RequestFinished) -> None:
            done = event.output.outputs[0].finish_reason != "abort"
            if others := [name for name in engine.requests if done]:
                book.abort(others[-1])

        engine.observers["nanofw_request_finished"] = abort_another
        for i in range(9):
            book.add(str(i), prompt(3 + i, i), SamplingParams(temperature=0, max_tokens=3 + i))
        book.finish(bound=200)
        assert book.ended["abort"] >= 3

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("budget", [8, 64])
    def test_common_beginnings(self, budget: int, depth: int) -> None:
        """Requests that begin alike, one of them aborted part-way, beside others: all end, with their own tokens.

        A scheduler may let a request wait until its beginning, being computed for another, can be found. Fails if it
        waits for what nobody computes any more. Source: the contract (`KVCache.worth_waiting`).
        """
        for aborted_at in range(1, 9):
            options = {"kv_cache": {"block_size": 4}}
            engine = self.engine(kv_cache="prefix", max_batch_tokens=budget, steps_in_flight=depth, options=options)
            book = Ledger(engine)
            for number in range(9):
                tokens = prompt(30, 0) if number % 3 else prompt(5, number)
                book.add(str(number), [*tokens, number], SamplingParams(temperature=0, max_tokens=4))
            for _ in range(aborted_at):
                book.step()
            if "1" in engine.requests:
                book.abort("1")
            book.finish(bound=300)

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("method", ["allocate", "match_prefix", "free"])
    def test_a_cache_that_raises(self, method: str, depth: int) -> None:
        """Any one call of the cache fails, before or after its work: afterwards `clear` puts all in order.

        Fails if a request is left in two places, or in none. Source: the contract.
        """
        for number in range(12):
            options = {"kv_cache": {"block_size": 4}}
            engine = self.engine(kv_blocks=8, max_num_seqs=3, steps_in_flight=depth, options=options)
            real, calls = getattr(engine.kv_cache, method), itertools.count()

            def failing(*args: Any, at: int = number, calls: Any = calls, real: Any = real) -> Any:
                call = next(calls)
                if call == at and at % 2:
                    raise MemoryError("on purpose")
                result = real(*args)
                if call == at:
                    raise MemoryError("on purpose")
                return result

            setattr(engine.kv_cache, method, failing)
            book = Ledger(engine, one_by_one=False)
            for i in range(4):
                book.add(str(i), prompt(3 + i, i), SamplingParams(temperature=0, max_tokens=8))
            while engine.has_work:
                with contextlib.suppress(MemoryError):
                    book.step()
            book.finish(bound=0)

    def test_200_requests_give_everything_back(self) -> None:
        """Free rows and blocks after 200 requests == at the start.

        Fails if the scheduler still holds what has ended. Source: jjang-ai/vmlx#68.
        """
        engine = self.engine(max_num_seqs=8, kv_blocks=16)
        work = [(prompt(1 + i * 7 % 40, i), 1 + i % 6) for i in range(200)]
        check(engine, work, run(engine, work))

    def test_memory_does_not_grow(self) -> None:
        """After some hundred requests, some hundred more leave nothing behind, not an object each.

        Fails if requests that have ended, or anything about them, are kept for ever. Source: the contract.
        """
        engine = self.engine(max_num_seqs=8, kv_blocks=16)
        left = left_behind(engine, [(prompt(1 + i * 7 % 40, i), 1 + i % 6) for i in range(100)])
        assert left < 0.5, f"{left:.1f} objects are left of each request"
