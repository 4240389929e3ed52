"""What a runner says of itself and hands to others: report, refusals, batches, errors; and that it shares no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nanofw.attention import Attention, AttentionSpec, Capabilities
from nanofw.batch import NULL_BLOCK, Batch, Step
from nanofw.component import NoOptions
from nanofw.kv_cache import LayerKV
from nanofw.model import Model
from nanofw.runner import Parts, Runner
from nanofw.testing.plain_attention import PlainAttention
from nanofw.testing.runner_base import Driven, PlainRunner, RunnerBase, Twin, describe, sizes
from nanofw.testing.runner_matches import MIXED, lengths
from nanofw.testing.small_model import SmallModel
from nanofw.testing.suite import cases


class Watched(Model):
    """Runs another model, keeps the batches and logits, and raises `error` at its next call if that is set."""

    def __init__(self, model: Model) -> None:
        self.model, self.spec = model, model.spec
        self.batches: list[Batch] = []
        self.logits: list[torch.Tensor] = []
        self.error: Exception | None = None

    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """See the contract."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        logits = self.model.forward(batch, attention, kv)
        self.batches.append(batch)
        self.logits.append(logits)
        return logits


class NotForGraphs(PlainAttention):
    """Reads lengths on the host while it runs, and says that it cannot be captured."""

    capabilities = Capabilities(graphs=False)

    def plan(self, batch: Batch) -> Any:
        """Lengths as the host knows them: those of this very step, or wrong."""
        plan = super().plan(batch)
        last = np.repeat(batch.seq_lens_host - batch.query_lens_host.cumsum(), batch.query_lens_host)
        plan.position.copy_(torch.from_numpy(last + np.arange(batch.num_tokens)))
        return plan


class Honest(RunnerBase):
    """Its report, its refusals, its errors."""

    def test_steps_above_the_largest_bucket_are_counted(self) -> None:
        """They run eagerly, are right, and `report.fallbacks` counts each with its reason; no other step of decode is.

        Fails for a runner that leaves its fast path in silence, or cuts the batch. Source: sglang#33900.
        """
        largest = self.largest()
        if largest >= self.rows:
            pytest.skip(f"{self.backend.__name__} has no bucket that {self.rows} requests exceed")
        twin = self.twin()
        rows = list(twin.open_all(lengths(largest + 1)))
        twin.step(dict(zip(rows, lengths(largest + 1), strict=True)))
        report = twin.mine.runner.report
        before = sum(report.fallbacks.values())
        for size in (largest, 1, largest):
            twin.decode(rows[:size])
        assert sum(report.fallbacks.values()) == before, f"steps that fit are counted as fallbacks: {report.fallbacks}"
        twin.decode(rows, steps=3, depth=1)
        assert sum(report.fallbacks.values()) == before + 3, f"3 steps of {largest + 1} requests: {report.fallbacks}"
        assert all(isinstance(reason, str) and reason.strip() for reason in report.fallbacks), report.fallbacks

    def test_the_report(self) -> None:
        """The path has a name, and every step is counted.

        Fails for a report that is shared between runners, or that counts something else. Source: sglang#33900.
        """
        first, second = self.twin(), self.twin()
        for twin, steps in ((first, 2), (second, 4), (first, 1)):
            rows = twin.open_all([3])
            twin.step(rows)
            twin.decode(rows, steps=steps)
            twin.close(rows)
        assert [twin.mine.runner.report.steps for twin in (first, second)] == [5, 5]
        assert first.mine.runner.report.path.strip(), "the report does not say which path was taken"

    def test_two_runners_side_by_side(self) -> None:
        """Two runners of one model take turns, each with a step in flight.

        Fails if buffers, graphs or last tokens are kept by the class or the module. Source: nothing is process-wide
        here, so that two engines can be compared in one.
        """
        model = self.make_model(self.torch_device())
        twins = [self.twin(model=model) for _ in "ab"]
        work = [twin.open_all(lengths(3 - number)) for number, twin in enumerate(twins)]
        for twin, rows in zip(twins, work, strict=True):
            twin.submit(rows)
        for _ in range(4):
            for twin, rows in zip(twins, work, strict=True):
                twin.submit(dict.fromkeys(rows, 1))
            for twin in twins:
                twin.collect()

    def test_refuses_what_it_would_get_wrong(self) -> None:
        """An attention that does not declare `graphs`: refused with reasons, or served rightly.

        It reads the host's lengths, as it may. Fails for a runner that captures it all the same. Source: the contract.
        """

        def parts(make: Any) -> Driven:
            model = self.make_model(self.torch_device())
            spec = AttentionSpec(model.spec.layers, model.spec.dtype, model.spec.device, 4)
            return Driven(make, model, NotForGraphs(spec, NoOptions()), rows=self.rows, blocks=self.rows * 16)

        reasons: list[str] = []

        def build(parts: Parts) -> Runner:
            reasons.extend(self.backend.validate(parts))
            return PlainRunner(parts, NoOptions()) if reasons else self.build(parts)

        twin = Twin(parts(build), parts(lambda parts: PlainRunner(parts, NoOptions())))
        assert all(isinstance(reason, str) and reason.strip() for reason in reasons), (
            f"reasons must be texts: {reasons}"
        )
        if not reasons:
            twin.mine.runner.warm_up()
            for size in (3, 2, 1):
                rows = twin.open_all(lengths(size))
                twin.step(rows)
                twin.decode(rows, steps=3)
                twin.close(rows)

    @cases(sizes)
    def test_batches_say_what_the_step_says(self, case: int) -> None:
        """What a model gets is the step, in the types that the contract names, and padding as the contract has it.

        Fails for bounds that are too low, tails that do not name the null block, or padding with a context. On a CPU
        only, where a batch can be looked into while it is used. Source: the contract.
        """
        device = self.torch_device()
        if device.type != "cpu":
            pytest.skip(f"batches on {device} cannot be looked into while they are captured")
        model = Watched(self.make_model(device))
        twin = self.twin(model=model)
        rows = twin.open_all(lengths(case))
        for work in (rows, *(dict.fromkeys(rows, 1),) * 3):
            model.batches.clear()
            step = twin.step(work)
            assert model.batches, f"{describe(step)}: the model was not called"
            for batch in model.batches:
                _check_batch(batch, step)

    def test_an_error_is_the_plugins_own(self) -> None:
        """What a model raises comes out as it is, in prefill and in decode, and the runner goes on with other requests.

        Fails if errors are swallowed or renamed, or if half a step stays behind. Source: out of memory is an ordinary
        event.
        """
        model = Watched(self.make_model(self.torch_device()))
        twin = self.twin(model=model)
        for decodes in (0, 1, 2):
            rows = twin.open_all([5, 3])
            work = rows
            for _ in range(decodes):
                twin.step(work)
                work = dict.fromkeys(rows, 1)
            twin.plain.submit(work)
            called, error = _out_of_memory(twin.mine, model, work)
            if called:  # a graph that is replayed does without it
                same = isinstance(error, torch.OutOfMemoryError) and str(error) == "no memory"
                assert same, f"the model ran out of memory, of which the runner made {error!r}"
            for driven in (twin.mine, twin.plain):
                driven.in_flight.clear()
            twin.close(rows)
            rows = twin.open_all(lengths(3), MIXED[decodes])
            twin.step(rows)
            twin.decode(rows, steps=3, depth=1)
            twin.close(rows)

    def test_nothing_is_recorded_for_gradients(self) -> None:
        """Weights that want gradients give logits without a graph behind them.

        Fails for a runner that launches outside of inference mode: memory grows with every step. Source: torch records
        by default.
        """
        inner = SmallModel(self.torch_device())
        inner.head.requires_grad_()
        model = Watched(inner)
        twin = self.twin(model=model)
        rows = twin.open_all([4, 2])
        twin.step(rows)
        twin.decode(rows, steps=2, depth=1)
        assert model.logits
        assert not any(logits.requires_grad for logits in model.logits), "logits keep a graph for gradients"


def _out_of_memory(driven: Driven, model: Watched, work: Mapping[int, int]) -> tuple[bool, Exception | None]:
    """Run a step in which the model fails: whether it was called at all, and what the runner raises."""
    model.error, found = torch.OutOfMemoryError("no memory"), None
    try:
        driven.submit(work)
        driven.collect()
    except Exception as error:  # whatever a runner makes of it
        found = error
    called, model.error = model.error is None, None
    return called, found


def _check_batch(batch: Batch, step: Step) -> None:
    """Raises AssertionError that says in what `batch` is not `step`, padded."""
    live, count, tokens = step.num_requests, batch.num_requests, step.num_tokens
    padding, what = count - live, describe(step)
    long, int32 = torch.int64, torch.int32
    expected: dict[str, tuple[torch.dtype, int, np.ndarray[Any, Any]]] = {
        "positions": (long, tokens, step.positions),
        "slot_mapping": (long, tokens, step.slot_mapping),
        "cu_seqlens_q": (int32, live + 1, step.cu_seqlens_q),
        "seq_lens": (int32, live, step.seq_lens),
        "logits_indices": (long, live, step.logits_indices),
    }
    for name, (dtype, length, values) in expected.items():
        found = getattr(batch, name)
        assert found.dtype == dtype, f"{what}: {name} is {found.dtype}, must be {dtype}"
        assert found[:length].tolist() == values.tolist(), f"{what}: {name} is {found.tolist()} for {values.tolist()}"
    assert batch.token_ids.dtype == long, f"{what}: token_ids is {batch.token_ids.dtype}"
    assert batch.num_tokens == tokens + padding, f"{what}: {batch.num_tokens} tokens for {tokens}, {padding} padding"
    assert padding <= batch.num_padding <= count, f"{what}: num_padding is {batch.num_padding} for {padding} of {count}"
    assert batch.slot_mapping[tokens:].tolist() == [-1] * padding, f"{what}: padding has slots"
    assert batch.seq_lens[live:].tolist() == [0] * padding, f"{what}: padding has a context"
    assert batch.cu_seqlens_q[live:].diff().tolist() == [1] * padding, f"{what}: padding is not one token each"
    table, columns = batch.block_table, step.block_table.shape[1]
    assert table.dtype == int32, f"{what}: block_table is {table.dtype}, must be int32"
    assert np.array_equal(table[:live, :columns].numpy(), step.block_table), f"{what}: block_table is another"
    rest = [*table[:live, columns:].flatten().tolist(), *table[live:].flatten().tolist()]
    assert set(rest) <= {NULL_BLOCK}, f"{what}: tails of block_table name blocks {sorted(set(rest))}"
    assert batch.max_query_len >= int(step.query_lens.max()), f"{what}: max_query_len is {batch.max_query_len}"
    assert batch.max_seq_len >= int(step.seq_lens.max()), f"{what}: max_seq_len is {batch.max_seq_len}"
    assert (batch.query_lens_host[:live] >= step.query_lens).all(), f"{what}: query_lens_host {batch.query_lens_host}"
    assert (batch.seq_lens_host[:live] >= step.seq_lens).all(), f"{what}: seq_lens_host is {batch.seq_lens_host}"
