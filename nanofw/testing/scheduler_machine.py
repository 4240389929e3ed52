"""Random lives of requests under a scheduler, against what the model must generate for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanofw.request import RequestOutput, SamplingParams
from nanofw.testing.audited import context_model, nothing_left, prompt

if TYPE_CHECKING:
    from nanofw.testing.scheduler_suite import SchedulerSuite

ENDS = (2, 17)
"""End-of-sequence ids, two of the fifty that the model generates."""


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run and are aborted; the model says what each must have got so far."""

    suite: ClassVar[type[SchedulerSuite]]
    depth: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[str, list[int]] = {}
        self.seen: dict[str, int] = {}
        self.added = 0

    @initialize(
        blocks=st.sampled_from((4, 6, 9, 40)),
        rows=st.integers(1, 5),
        budget=st.sampled_from((1, 3, 8, 64)),
        block_size=st.sampled_from((1, 4)),
    )
    def start(self, blocks: int, rows: int, budget: int, block_size: int) -> None:
        """An engine, from cramped to ample."""
        self.engine = self.suite.engine(
            eos_token_ids=ENDS,
            kv_blocks=blocks * 4 // block_size,
            max_num_seqs=rows,
            max_batch_tokens=budget,
            steps_in_flight=self.depth,
            options={"kv_cache": {"block_size": block_size}},
        )

    @rule(several=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 12), st.booleans()), min_size=1, max_size=4))
    def add(self, several: list[tuple[int, int, bool]]) -> None:
        """New requests, sometimes under an id that was used before."""
        for length, count, stream in several:
            self._add(length, count, stream)

    def _add(self, length: int, count: int, stream: bool) -> None:
        request_id = str(self.added % 7) if str(self.added % 7) not in self.engine.requests else f"own-{self.added}"
        tokens = prompt(length, self.added)
        self.engine.add(request_id, tokens, SamplingParams(temperature=0, max_tokens=count), stream=stream)
        following = context_model().greedy(tokens, min(count, self.engine.kv_cache.capacity + 1 - length))
        end = next((i for i, token in enumerate(following) if token in ENDS), len(following))
        self.expected[request_id], self.seen[request_id] = following[: end + 1], 0
        self.added += 1

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        """Some steps; every output is looked at."""
        for _ in range(times):
            self._look(self.engine.step())

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """One request ends now."""
        request_id = data.draw(st.sampled_from(sorted(self.expected)), "id")
        output = self.engine.abort(request_id)
        assert output is not None
        self._look([output])

    @invariant()
    def books_balance(self) -> None:
        """Every unfinished request waits or holds a row; blocks are whole."""
        engine = self.engine
        engine.kv_cache.check_integrity()
        running = engine.table.rows - engine.table.free_rows
        assert running + engine.scheduler.num_waiting == len(engine.requests) == len(self.expected)
        assert running <= engine.scheduler.limits.max_num_seqs

    def _look(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            completion, expected = output.outputs[0], self.expected[output.request_id]
            tokens = list(completion.token_ids)
            assert tokens == expected[: len(tokens)], f"request {output.request_id}: wrong tokens"
            assert output.finished or len(tokens) == self.seen[output.request_id] + 1, "a token was not reported"
            self.seen[output.request_id] = len(tokens)
            if output.finished:
                assert completion.finish_reason == "abort" or tokens == expected, "tokens are missing"
                del self.expected[output.request_id], self.seen[output.request_id]

    def teardown(self) -> None:
        """All that is unfinished ends in a bounded number of steps, and leaves nothing behind."""
        if not hasattr(self, "engine"):
            return
        bound = 10 + 40 * (len(self.expected) + 1) * 4
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self._look(self.engine.step())
        assert not self.expected, f"unfinished after {bound} steps: {sorted(self.expected)}"
        nothing_left(self.engine)
