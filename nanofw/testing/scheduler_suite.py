"""Conformance suite of schedulers.

Subclass it in a test file, and pytest runs all of it on your scheduler:

    from nanofw.testing import SchedulerSuite
    from my_plugin import MyScheduler

    class TestMyScheduler(SchedulerSuite):
        backend = MyScheduler

A real engine runs with a model whose tokens are known beforehand and depend on the whole context, as the KV cache holds
it: a token that is lost, repeated, or computed from the wrong context is found at once. Between scheduler and runner an
`Auditor` looks at every step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from nanofw.engine import Engine
from nanofw.events import RequestFinished
from nanofw.request import SamplingParams
from nanofw.scheduler import Scheduler
from nanofw.testing.audited import (
    NAME,
    audited_engine,
    audited_steps,
    check,
    context_model,
    host_with,
    nothing_left,
    prompt,
    run,
    run_params,
)
from nanofw.testing.ledger import Ledger
from nanofw.testing.scheduler_machine import SchedulerMachine


class SchedulerSuite:
    """What every scheduler must do.

    Class attributes a subclass sets:
        backend: the scheduler class. options: its options, as a user would set them.
        mixes: a long prompt is computed in chunks while others keep decoding.
        preempts: requests are put back when blocks run out (else they must reserve what they need).
        patience: steps within which the oldest request must have ended, however many come after it.
    """

    backend: ClassVar[type[Scheduler]]
    options: ClassVar[Mapping[str, Any]] = {}
    mixes: ClassVar[bool] = True
    preempts: ClassVar[bool] = True
    patience: ClassVar[int] = 300

    max_examples: ClassVar[int] = 25
    steps: ClassVar[int] = 40
    phases: ClassVar[Sequence[Phase]] = tuple(Phase)

    @classmethod
    def engine(cls, eos_token_ids: tuple[int, ...] = (), **changes: Any) -> Engine:
        """An engine with this scheduler and a `ContextModel`."""
        options = {**changes.pop("options", {}), "scheduler": cls.options}
        host = host_with("scheduler", cls.backend)
        return audited_engine(host, eos_token_ids, scheduler=NAME, options=options, **changes)

    @pytest.mark.parametrize("depth", [0, 1])
    def test_lives_of_requests(self, depth: int) -> None:
        """Add, step and abort at random, in pools from tiny to ample: every token right, nothing lost, nothing leaked.

        Fails with the shortest life that breaks one of these. Sources: vllm#39734 and #1534 (waiting for ever),
        vllm#16832 and transformers#43150 (preemption lost tokens), vllm#10583 (ids used twice), jjang-ai/vmlx#68
        (blocks kept).
        """
        # Made anew for each suite: Hypothesis refuses one test that several classes inherit (differing executors).
        machine = type(f"{type(self).__name__}Machine", (SchedulerMachine,), {"suite": type(self), "depth": depth})
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

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("blocks", [64, 8, 5])
    def test_small_pools_give_the_same_tokens(self, blocks: int, depth: int) -> None:
        """Requests that together exceed the pool, a little and by far, lose no token.

        Fails if a request that is put back forgets what it has generated. Source: vllm#16832.
        """
        engine = self.engine(kv_blocks=blocks, steps_in_flight=depth, options={"kv_cache": {"block_size": 4}})
        work = [(prompt(3 + i, i), 10) for i in range(4)]
        outputs = run(engine, work)
        check(engine, work, outputs)
        if self.preempts and blocks < 64:
            assert sum(o.preemptions for o in outputs) > 0, "the pool was meant to be too small: nothing was put back"
        if blocks == 64:
            assert not any(o.preemptions for o in outputs), "put back although there was room"

    @pytest.mark.parametrize("depth", [0, 1])
    def test_sampled_tokens_survive_preemption(self, depth: int) -> None:
        """With temperature and seeds too, a small pool and a large one, early and late values, give the same tokens.

        Fails if a token is drawn again at another position. Source: transformers#43150.
        """
        params = [SamplingParams(temperature=1.0, top_k=20, seed=i, max_tokens=12) for i in range(5)]
        prompts = [prompt(4, i) for i in range(5)]
        options = {"kv_cache": {"block_size": 4}}
        expected = run_params(self.engine(options=options), prompts, params)
        small = self.engine(kv_blocks=7, steps_in_flight=depth, options=options)
        assert run_params(small, prompts, params) == expected
        assert len({tuple(tokens) for tokens in expected}) == 5

    @pytest.mark.parametrize("budget", [1, 2, 7, 64])
    def test_any_budget_gives_the_same_tokens(self, budget: int) -> None:
        """Prompts in chunks of any size, down to one token a step; the auditor holds each step to the budget.

        Fails if the end of a chunk is taken for the end of the prompt, or the budget is exceeded. Source: chunked
        prefill (Agrawal et al., SARATHI, 2023).
        """
        engine = self.engine(max_batch_tokens=budget, max_num_seqs=4)
        work = [(prompt(length, length), 5) for length in (1, 2, 15, 16, 17, 33)]
        check(engine, work, run(engine, work))

    @pytest.mark.parametrize("rows", [1, 2, 5])
    def test_any_number_of_rows_gives_the_same_tokens(self, rows: int) -> None:
        """More requests than rows: the others wait their turn.

        Fails if a request is admitted without a row, or forgotten while it waits. Source: vllm#1534.
        """
        engine = self.engine(max_num_seqs=rows)
        work = [(prompt(5 + i, i), 1 + i) for i in range(8)]
        check(engine, work, run(engine, work))

    def test_long_prompt_does_not_stop_the_others(self) -> None:
        """While a long prompt is computed in chunks, a request in decode gets its token in every step.

        Fails if prefill runs alone although `mixes` is declared. Source: chunked prefill (Agrawal et al., SARATHI,
        2023).
        """
        if not self.mixes:
            pytest.skip(f"{self.backend.__name__} declares that it does not mix prefill and decode")
        engine = self.engine(max_batch_tokens=8)
        engine.add("short", prompt(4, 0), SamplingParams(temperature=0, max_tokens=40))
        engine.step()
        engine.add("long", prompt(100, 1), SamplingParams(temperature=0, max_tokens=2))
        mixed = 0
        while "long" in engine.requests:
            before = len(audited_steps(engine))
            engine.step()
            for step in audited_steps(engine)[before:]:
                assert (step.query_lens == 1).any(), "the request in decode was left out of a step"
                mixed += bool(step.max_query_len > 1)
        assert mixed >= 100 // 8
        assert mixed <= 20, "the budget was not used"

    def test_oldest_request_does_not_starve(self) -> None:
        """A long request ends within `patience` steps although a newcomer arrives at every one.

        Fails if newcomers overtake for ever. Source: vllm#39734.
        """
        engine = self.engine(max_batch_tokens=8, max_num_seqs=4, kv_blocks=10, options={"kv_cache": {"block_size": 4}})
        engine.add("oldest", prompt(17, 0), SamplingParams(temperature=0, max_tokens=15))
        for number in range(self.patience):
            if "oldest" not in engine.requests:
                break
            if len(engine.requests) < 12:
                engine.add(f"new-{number}", prompt(1 + number % 9, number), SamplingParams(temperature=0, max_tokens=4))
            engine.step()
        else:
            pytest.fail(f"still unfinished after {self.patience} steps")

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("budget", [8, 64])
    def test_common_beginnings(self, budget: int, depth: int) -> None:
        """Requests that begin alike, one of them aborted part-way, beside others: all end, with their own tokens.

        A scheduler may let a request wait until its beginning, being computed for another, can be found. Fails if it
        waits for what nobody computes any more. Source: nano-vllm#208.
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

    def test_200_requests_give_everything_back(self) -> None:
        """Free rows and blocks after 200 requests == at the start.

        Fails if the scheduler still holds what has ended. Source: jjang-ai/vmlx#68.
        """
        engine = self.engine(max_num_seqs=8, kv_blocks=16)
        work = [(prompt(1 + i * 7 % 40, i), 1 + i % 6) for i in range(200)]
        check(engine, work, run(engine, work))
