"""A runner gives what plain eager steps give: every batch size, every kind of step, fed tokens, sampling, scoring."""

from __future__ import annotations

from nanofw.request import SamplingParams
from nanofw.testing.runner_base import RunnerBase, sizes
from nanofw.testing.suite import cases

LENGTHS = (3, 9, 1, 6, 4, 13, 2, 8, 5, 7, 16, 11)
"""Prompts: 1, on both sides of a block of 4, and several blocks."""

MIXED = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, top_k=5, seed=-1),
    SamplingParams(temperature=1.5, top_p=0.8, seed=2**40),
    SamplingParams(temperature=1e-5, seed=3),
)
"""Ways to choose a token that share a batch."""


def lengths(count: int) -> list[int]:
    """Prompt lengths of so many requests."""
    return [LENGTHS[i % len(LENGTHS)] for i in range(count)]


class Matches(RunnerBase):
    """The tokens are right."""

    @cases(sizes)
    def test_every_batch_size(self, case: int) -> None:
        """Prompts, then decode steps, as many requests as the case says: the tokens of plain eager steps.

        Fails for a runner that takes the wrong bucket, pads wrongly, or runs a step above its largest bucket in it.
        Sources: sglang#37531, vllm#7999.
        """
        twin = self.twin()
        rows = twin.open_all(lengths(case))
        twin.step(rows)
        twin.decode(rows, steps=4)
        twin.check_pools()

    @cases(sizes)
    def test_every_batch_size_with_a_step_in_flight(self, case: int) -> None:
        """The same with step N+1 submitted before N is waited for: its input tokens are known to the device alone.

        Fails if `step.feeds` is not honoured, or if N+1 overwrites what N has still to deliver. Source: the contract.
        """
        twin = self.twin()
        rows = twin.open_all(lengths(case))
        twin.submit(rows)
        twin.decode(rows, steps=5, depth=1)
        twin.check_pools()

    @cases(sizes)
    def test_mixed_steps(self, case: int) -> None:
        """Decode, a chunk of a prompt and a whole prompt in one step, then all of them in decode, at both depths.

        Fails if a step with prefill leaves other last tokens or caches behind than one without. Source: the contract.
        """
        for depth in (0, 1):
            twin = self.twin()
            rows = list(twin.open_all(lengths(case)))
            for turn in range(4):
                work = {row: min(1 + (turn + i) % 3 * 20, twin.needs(row)) for i, row in enumerate(rows)}
                twin.advance(work, depth)
            while unfinished := {row: twin.needs(row) for row in rows if twin.needs(row) > 1}:
                twin.advance(unfinished, depth)
            twin.decode(rows, steps=3, depth=depth)

    def test_only_some_tokens_are_fed(self) -> None:
        """A step takes some of its tokens from the step in flight, and others from the host, in any order.

        Fails if all rows, or none, or those of another place are fed. Source: the contract.
        """
        twin = self.twin()
        rows = list(twin.open_all(lengths(4)))
        twin.step(dict(zip(rows, lengths(4), strict=True)))
        for turn in range(6):
            twin.submit(dict.fromkeys(rows[turn % 2 :: 2], 1))
            twin.submit(dict.fromkeys(reversed(rows), 1))
            twin.collect()
            twin.collect()

    def test_order_and_rows_change(self) -> None:
        """Requests come in any order, end, and leave their rows to others, who are smaller or larger.

        Fails if a token is kept by its place in the batch and not by its row, or by the row's earlier request. Source:
        the contract.
        """
        twin = self.twin()
        work = twin.open_all(lengths(self.rows - 2))  # no bucket, as a rule
        twin.step(work)
        rows = list(work)
        for turn in range(4):
            twin.decode(rows[::-1], depth=turn % 2)
            rows = rows[1:] + rows[:1]
            gone, rows = rows[: 1 + turn % 2], rows[1 + turn % 2 :]
            twin.close(gone)
            twin.decode(rows, steps=2, depth=1)
            new = twin.open_all([2 + 5 * turn, 3][: len(gone)])
            twin.step(new)
            rows = [*new, *rows]

    def test_rows_change_hands_in_flight(self) -> None:
        """A request ends while its next step is still in flight, and another one begins in its row.

        Fails if what was computed beyond the end of the first, which must be dropped, reaches the second. Source: the
        contract.
        """
        twin = self.twin()
        rows = list(twin.open_all(lengths(3)))
        twin.submit(dict(zip(rows, lengths(3), strict=True)))
        for length in (2, 7, 5):
            twin.advance(dict.fromkeys(rows, 1), depth=1)
            twin.close(rows[:1])
            (new,) = twin.open_all([length])
            assert new == rows[0]
            twin.advance({new: length} | dict.fromkeys(rows[1:], 1), depth=1)
            rows = [*rows[1:], new]
        twin.decode(rows, steps=2, depth=1)

    @cases(lambda suite: (1, 3))
    def test_block_tables_grow(self, case: int) -> None:
        """Contexts that grow through many blocks, and short ones after them.

        Fails at the step at which a request outgrows the columns of a static block table, or keeps old ones. Source:
        the contract.
        """
        twin = self.twin()
        rows = twin.open_all([1, 6, 30][:case])
        twin.step(rows)
        twin.decode(rows, steps=26, depth=1)
        twin.close(rows)
        rows = twin.open_all([2] * case)
        twin.step(rows)
        twin.decode(rows, steps=3)

    @cases(lambda suite: (0, 1))
    def test_ways_to_sample_share_a_batch(self, case: int) -> None:
        """Greedy, temperatures, top-k, top-p and seeds mixed, at this depth; plain greedy steps before and after.

        Fails if parameters of an earlier step, or those of the step that was captured, are used again. Source: the
        contract.
        """
        twin = self.twin()
        for ways in (MIXED[:1], MIXED[1:], MIXED[:2], MIXED[::-1], MIXED[:1]):
            rows = [twin.open(5, ways[i % len(ways)]) for i in range(5)]
            twin.step(dict.fromkeys(rows, 5))
            twin.decode(rows, steps=3, depth=case)
            twin.close(rows)

    @cases(lambda suite: (0, 1))
    def test_log_probabilities(self, case: int) -> None:
        """Of the chosen token and of as many others as the rows ask for, which is another number in each batch.

        Fails if buffers of results are shared by steps in flight, or were made for another number. Source: vllm#44319.
        """
        twin = self.twin()
        for wanted in (2, 0, 5, 2):
            ways = [SamplingParams(temperature=i % 2, seed=i, logprobs=wanted if i else None) for i in range(3)]
            rows = [twin.open(4, how) for how in ways]
            twin.step(dict.fromkeys(rows, 4))
            twin.decode(rows, steps=3, depth=case)
            twin.close(rows)

    def test_prompts_are_scored(self) -> None:
        """Log-probabilities of prompt tokens, in chunks of one token too, beside requests in decode.

        Fails if a step of one token each that asks for them is taken for plain decode. Source: the contract.
        """
        twin = self.twin()
        (decoding,) = twin.open_all([3])
        twin.step({decoding: 3})
        scored = twin.open(7, SamplingParams(temperature=0, prompt_logprobs=3))
        for chunk in (1, 3, 1, 1, 1):
            twin.step({decoding: 1, scored: chunk})
        twin.decode([scored, decoding], steps=2, depth=1)
