"""What a runner writes: the slots of its tokens and no more, whatever pads a step, warms up, or was there before."""

from __future__ import annotations

import math

import pytest
import torch

from nanofw.batch import Step
from nanofw.testing.runner_base import BLOCK_SIZE, Driven, RunnerBase, sizes
from nanofw.testing.runner_matches import lengths
from nanofw.testing.small_model import SmallModel
from nanofw.testing.suite import cases
from nanofw.testing.tolerance import bits


class Memory(RunnerBase):
    """Padding, warm-up and earlier steps touch nobody."""

    @cases(sizes)
    def test_only_live_slots_are_written(self, case: int) -> None:
        """Bytes of the whole pool differ only at the slots of the step's tokens, in every layer.

        The pool is just large enough: its last block, where slot -1 of padding would lead, and the first one, beside
        the null block that padding points at, are both in use. Fails if padding writes anywhere. Source: vllm#43810.
        """
        count = [BLOCK_SIZE + 1 + i % 2 for i in range(case)]
        twin = self.twin(blocks=2 * case)
        for layer in twin.mine.cache.layers:
            layer.key.copy_(torch.randn(layer.key.shape, generator=torch.Generator().manual_seed(1)))
            layer.value.copy_(torch.randn(layer.key.shape, generator=torch.Generator().manual_seed(2)))
        rows = twin.open_all(count)
        _written_by(twin.mine, twin.step, dict.fromkeys(rows, BLOCK_SIZE))
        _written_by(twin.mine, twin.step, {row: n - BLOCK_SIZE for row, n in rows.items()})
        owned = {int(block) for row in rows for block in twin.mine.cache.block_table[row, :2]}
        assert {1, 2 * case} <= owned
        for _ in range(2):
            _written_by(twin.mine, twin.step, dict.fromkeys(rows, 1))

    @cases(lambda suite: [f"{size}-{fill}" for size in sizes(suite) for fill in (math.nan, 1e6)])
    def test_padding_reaches_nobody(self, case: str) -> None:
        """The hidden state of padding rows is NaN, or huge: live requests get the same tokens, the cache none of it.

        Fails if padding shares a slot, a block or a row of results with a request. Sources: sglang#32477, #35351.
        """
        size, fill = case.split("-")
        twin = self.twin(model=SmallModel(self.torch_device(), padding=float(fill)))
        plain = twin.plain.runner.parts.model
        if not isinstance(plain, SmallModel):
            pytest.skip("the runner is made for a model whose padding cannot be poisoned from here")
        rows = twin.open_all(lengths(int(size)))
        twin.step(rows)
        twin.decode(rows, steps=3, depth=1)
        twin.check_pools()
        held = twin.mine.cache.block_table[list(rows)]
        assert (held > 0).any()
        for pool in twin.mine.pools():
            null = pool[:BLOCK_SIZE]
            assert bool(null.isnan().all() if math.isnan(twin.mine.poison) else (null == twin.mine.poison).all()), (
                "the null block was written"
            )

    def test_a_larger_step_before_leaves_nothing(self) -> None:
        """Full steps of long contexts, then ever smaller ones of short contexts, in blocks that were poisoned between.

        Fails if what an earlier step left in a static buffer (a slot, a length, a block, a row) is used again. Source:
        the contract.
        """
        for size in range(min(self.largest(), self.rows), 0, -1):
            twin = self.twin()
            many = twin.open_all([21 - i for i in range(min(self.largest(), self.rows))])
            twin.step(many)
            twin.decode(many, steps=2, depth=1)
            twin.close(many)
            few = twin.open_all([2] * size)
            twin.step(few)
            for _ in range(3):
                _written_by(twin.mine, twin.step, dict.fromkeys(few, 1))

    def test_warming_up_leaves_no_trace(self) -> None:
        """After `warm_up` no byte of the cache has changed, no step is counted, and the first tokens are right.

        Fails if what is compiled or captured is run on somebody's blocks, or its tokens stay behind. Source: the
        contract.
        """
        driven = self.drive(warm=False)
        for pool in driven.pools():
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(4)))
        before = [pool.clone() for pool in driven.pools()]
        driven.runner.warm_up()
        for old, new in zip(before, driven.pools(), strict=True):
            changed = (bits(old) != bits(new)).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert not changed, f"warm_up() writes into the cache, at slots {changed[:5]}"
        report = driven.runner.report
        assert (report.steps, report.fallbacks) == (0, {}), f"warm_up() is counted as steps: {report}"


def _written_by(driven: Driven, run: object, work: dict[int, int]) -> None:
    """Run a step; the slots whose bytes changed must be those of its tokens."""
    before = [pool.clone() for pool in driven.pools()]
    step: Step = run(work)  # type: ignore[operator]
    slots = set(step.slot_mapping.tolist())
    for number, (old, new) in enumerate(zip(before, driven.pools(), strict=True)):
        changed = set((bits(old) != bits(new)).flatten(1).any(1).nonzero()[:, 0].tolist())
        what = f"layer {number // 2}, {step.num_requests} requests"
        assert changed <= slots, f"{what}: slots {sorted(changed - slots)} were written, the step's are {sorted(slots)}"
        assert changed == slots, f"{what}: slots {sorted(slots - changed)} of the step were not written"
