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

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from nanofw.request import SamplingParams
from nanofw.testing.audited import audited_steps, check, prompt, run, run_params
from nanofw.testing.count_laws import CountLaws
from nanofw.testing.scheduler_ends import SchedulerEnds
from nanofw.testing.scheduler_machine import SchedulerMachine


class SchedulerSuite(SchedulerEnds, CountLaws):
    """Every request gets its tokens, in its turn, whatever the budget, the rows and the pool."""

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

        Fails if what was generated is lost, or drawn again at another position. Sources: vllm#16832,
        transformers#43150.
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

        Fails if a request is admitted without a row, or forgotten while it waits. Source: the contract.
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
