"""Logits equal those of transformers on the same weights, however the tokens are cut into steps and put together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from nanofw.testing.model_base import ModelBase, Served, check_close, padded, sequence
from nanofw.testing.suite import cases
from nanofw.testing.tolerance import check_same_bits

LENGTHS = (3, 21, 1, 12)
"""One token, a few, and more than a window of 8 or 16, on both sides of a block of 4."""


def in_company(suite: type[Matches]) -> Iterator[str]:
    """Each model with each company."""
    for name in suite.models:
        yield from (f"{name}-{size}" for size in suite.companies)


class Matches(ModelBase):
    """The logits are right, in every kind of step.

    Attributes a subclass may set:
        companies: how many requests a step has; of one of them each token is known.
    """

    companies: ClassVar[tuple[int, ...]] = (1, 2, 7, 32)

    @cases(lambda suite: suite.models)
    def test_prompts(self, case: str) -> None:
        """Whole prompts of several lengths in one step: the logits of transformers.

        Fails for a wrong weight, norm, scale, rotation, window, cap or head, or if sequences see each other. Source:
        sglang#1508.
        """
        served, work = self.served(case, LENGTHS)
        served.check(work, self.oracle(case), f"{case}, prompts")

    @cases(lambda suite: suite.models)
    def test_chunks(self, case: str) -> None:
        """Prompts in chunks, each request another one: what was computed before is found in the cache.

        Fails if positions start again in each chunk, or if a chunk does not see those before it. Source: the contract.
        """
        served, work = self.served(case, LENGTHS)
        sizes = {row: 2 + 3 * i for i, row in enumerate(work)}
        while step := {row: min(sizes[row], served.left(row)) for row in work if served.left(row)}:
            served.check(step, self.oracle(case), f"{case}, chunks")

    @cases(lambda suite: suite.models)
    def test_decode(self, case: str) -> None:
        """Steps of one token each after the prompts, as most steps are: they may take other kernels.

        Fails for a rotation that is off by one, or a route that only small steps take. Source: the contract.
        """
        served, work = self.served(case, LENGTHS)
        work = {row: length - 2 for row, length in work.items() if length > 2}
        served.check(work, self.oracle(case), f"{case}, prompts")
        for _ in range(2):
            served.check(dict.fromkeys(work, 1), self.oracle(case), f"{case}, decode")

    @cases(lambda suite: suite.models)
    def test_mixed_steps(self, case: str) -> None:
        """Decode, a later chunk and a whole prompt in one step, in another order than they came.

        Fails for a model that takes a step to be one kind of work. Source: the contract.
        """
        served, work = self.served(case, (7, 12, 5))
        first, second, third = work
        served.check({first: 6, second: 4}, self.oracle(case), f"{case}, prompts")
        served.check({third: 5, first: 1, second: 8}, self.oracle(case), f"{case}, mixed")

    @cases(lambda suite: suite.models)
    def test_logits_of_any_token(self, case: str) -> None:
        """`logits_indices` names more tokens than the last ones: their logits follow, in its order (prompt scores).

        Fails for a model that takes the last token of each request whatever is asked. Source: the contract.
        """
        served, work = self.served(case, (6, 3))
        _, batch = served.batch(work)
        asked = torch.tensor([8, 0, 4, 6, 0], device=batch.logits_indices.device)
        logits = served.forward(replace(batch, logits_indices=torch.cat((batch.logits_indices, asked))))
        assert logits.shape[0] == 7, f"{case}: {logits.shape[0]} rows of logits for 7 of logits_indices"
        exact = [self.oracle(case).logits(served.tokens(row)) for row in work]
        allowed = max(self.oracle(case).allowed(served.tokens(row)) for row in work)
        everything = torch.cat(exact)
        for found, at in zip(logits, (5, 8, 8, 0, 4, 6, 0), strict=True):
            check_close(found, everything[at], allowed, f"{case}, logits of packed token {at}")

    @cases(lambda suite: suite.models)
    def test_padding(self, case: str) -> None:
        """Padding behind a decode step, as a graph's bucket has it: live logits are right whatever the padding holds.

        Nothing of it is written. Fails if padding shares a sum, a maximum or a slot with the requests. Source:
        vllm#43810.
        """
        outputs = []
        for token in (0, 77):
            served, work = self.served(case, (6, 9, 3))
            served.run({row: length - 1 for row, length in work.items()})
            step, batch = served.batch(dict.fromkeys(work, 1))
            before = [pool.clone() for pool in served.pools()]
            outputs.append(served.forward(padded(batch, 2, token))[:3])
            served.compare(work, outputs[-1], self.oracle(case), f"{case}, padded decode")
            slots = set(step.slot_mapping.tolist())
            for old, new in zip(before, served.pools(), strict=True):
                changed = set((old != new).flatten(1).any(1).nonzero()[:, 0].tolist())
                assert changed <= slots, f"{case}: padding wrote to slots {sorted(changed - slots)}"
        check_same_bits(outputs[1], outputs[0], f"{case}: live logits depend on the token of padding rows")

    @cases(in_company)
    def test_greedy_tokens_alone_and_in_company(self, case: str) -> None:
        """One request alone and among others: the same tokens, in float32.

        In half precision a tie may fall to the other side: the first difference must be one between near equals. Fails
        if a request's logits depend on others by more than rounding. Source: transformers#25921.
        """
        name, _, size = case.rpartition("-")
        tokens = sequence(9, 0, self.model(name).spec.vocab_size)
        for found in self._greedy(name, tokens, int(size)):
            expected = self.oracle(name).logits(tokens)[-1]
            at = int(expected.argmax())
            gap = float(expected[at] - expected[found])
            near = self.dtype != torch.float32 and gap <= 2 * self.oracle(name).allowed(tokens)
            what = f"{case}: token {len(tokens)} is {found} in company, {at} alone, {gap:.3g} apart"
            assert found == at or near, what
            tokens.append(found)

    def _greedy(self, name: str, tokens: list[int], size: int) -> list[int]:
        """The next three greedy tokens of a request, the last of so many."""
        served = Served(self.model(name))
        vocab = served.model.spec.vocab_size
        rows = [served.open(sequence(1 + i % 3, i, vocab)) for i in range(1, size)]
        rows.append(served.open(tokens))
        found = []
        for _ in range(3):
            step, batch = served.batch({row: served.left(row) for row in rows})
            chosen = served.forward(batch).argmax(-1).tolist()
            served.take(step, chosen)
            found.append(chosen[-1])
        return found
