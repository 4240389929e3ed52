"""Random lives of requests under a scheduler, against what the model must generate for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanofw.request import SamplingParams
from nanofw.testing.audited import prompt
from nanofw.testing.ledger import Ledger

if TYPE_CHECKING:
    from nanofw.testing.scheduler_suite import SchedulerSuite

ENDS = (2, 17)
"""End-of-sequence ids, two of the fifty that the model generates."""

FAMILIES = 3
"""Prompts of one family begin alike."""


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run and are aborted; the model says what each must have got so far."""

    suite: ClassVar[type[SchedulerSuite]]
    depth: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.added = 0

    @initialize(
        blocks=st.sampled_from((4, 6, 9, 40)),
        rows=st.integers(1, 5),
        budget=st.sampled_from((1, 3, 8, 64)),
        block_size=st.sampled_from((1, 4)),
        kv_cache=st.sampled_from(("paged", "prefix")),
    )
    def start(self, blocks: int, rows: int, budget: int, block_size: int, kv_cache: str) -> None:
        """An engine, from cramped to ample."""
        engine = self.suite.engine(
            eos_token_ids=ENDS,
            kv_blocks=blocks * 4 // block_size,
            max_num_seqs=rows,
            max_batch_tokens=budget,
            steps_in_flight=self.depth,
            kv_cache=kv_cache,
            options={"kv_cache": {"block_size": block_size}},
        )
        self.ledger = Ledger(engine)

    @rule(several=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 12), st.booleans()), min_size=1, max_size=4))
    def add(self, several: list[tuple[int, int, bool]]) -> None:
        """New requests, sometimes under an id that was used before."""
        for length, count, stream in several:
            again = str(self.added % 7)
            request_id = again if again not in self.ledger.unfinished else f"own-{self.added}"
            params = SamplingParams(temperature=0, max_tokens=count)
            self.ledger.add(request_id, prompt(14, self.added % FAMILIES)[:length], params, stream)
            self.added += 1

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        """Some steps; every output is looked at."""
        for _ in range(times):
            self.ledger.step()

    @precondition(lambda self: self.ledger.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """One request ends now."""
        self.ledger.abort(data.draw(st.sampled_from(sorted(self.ledger.unfinished)), "id"))

    @invariant()
    def books_balance(self) -> None:
        """Every unfinished request waits or holds a row; blocks are whole."""
        self.ledger.balance()

    def teardown(self) -> None:
        """All that is unfinished ends in a bounded number of steps, and leaves nothing behind."""
        if hasattr(self, "ledger"):
            self.ledger.finish(bound=10 + 160 * (len(self.ledger.unfinished) + 1))
