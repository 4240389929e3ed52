"""Scaling faults, planted into right plugins one at a time: their count laws must find each, and say what grows."""

import pytest
import torch

from nanofw import CountLaw
from nanofw.attention import Attention
from nanofw.batch import NULL_BLOCK
from nanofw.launch import launch
from nanofw.sampler import Sampled
from nanofw.testing import AttentionSuite
from nanofw.testing.count_laws import CountLaws
from nanofw.testing.planted import Faults
from nanofw_basics.continuous import ContinuousScheduler
from nanofw_basics.eager import EagerRunner
from nanofw_basics.paged_cache import PagedKVCache
from nanofw_basics.sampler import DefaultSampler
from nanofw_basics.transformers_model import TransformersModel
from nanofw_gather.naive import NaiveGather
from nanofw_gather.vectorized import VectorizedGather

faults = Faults(AttentionSuite)


class TestVectorized(CountLaws):
    """What the faults are planted into keeps its laws."""

    backend = VectorizedGather


@faults.plant("test_count_laws[aten_calls*", r"aten_calls = .* B.*; declared slope in B: 0")
class LoopsOverRequests(VectorizedGather):
    """Right numbers, one request at a time."""

    def attend_group(self, q, kv, group):
        parts = [self.part(group, i) for i in range(len(q))]
        return torch.cat(
            [super(LoopsOverRequests, self).attend_group(q[i : i + 1], kv, p) for i, p in enumerate(parts)]
        )

    def part(self, group, i):
        rows = slice(i, i + 1)
        return type(group)(group.table[rows], group.tokens, group.real, group.query_pos[rows], group.beyond[rows])


@faults.plant("test_count_laws[host_reads*", r"host_reads = .* B.*; declared slope in B: 0")
class ReadsLengthsOneByOne(VectorizedGather):
    """A hidden `.item()`: on a GPU, each waits for all that was launched."""

    def plan(self, batch):
        for length in batch.seq_lens:
            assert length.item() >= 0
        return super().plan(batch)


@faults.plant("test_count_laws[host_reads*", r"host_reads = .* B.*; declared slope in B: 0")
class AsksForEachMaximum(VectorizedGather):
    """The same, where no `.item()` is written: a tensor decides a branch."""

    def attend(self, q, kv, batch):
        for row in q:
            if row.isnan().any():
                raise ValueError("NaN in a query")
        return super().attend(q, kv, batch)


@faults.plant("test_count_laws[python_calls*", r"python_calls = .* B.*; declared slope in B: 0")
class LoopsOverRowsInPython(VectorizedGather):
    """Not one operation more, but the host works request by request."""

    def plan(self, batch):
        self.longest = max(self.length(batch, i) for i in range(batch.num_requests))
        return super().plan(batch)

    def length(self, batch, i):
        return int(batch.seq_lens_host[i])


@faults.plant("test_count_laws[python_calls*", r"python_calls = .* B ctx; declared slope in B ctx: 0")
class LoopsOverPositionsInPython(VectorizedGather):
    def plan(self, batch):
        self.slots = [self.slot(position) for s in batch.seq_lens_host for position in range(s)]
        return super().plan(batch)

    def slot(self, position):
        return position // self.spec.block_size


@faults.plant("test_count_laws[bytes_written*", r"bytes_written = .* B ctx; declared slope in B ctx: 0")
class CopiesTheContext(VectorizedGather):
    """Says that it reads the cache in place."""

    laws = (
        *(law for law in VectorizedGather.laws if getattr(law, "counter", None) != "bytes_written"),
        CountLaw("bytes_written", grows_with=("B",)),
    )


@faults.plant("test_count_laws[bytes_written*", r"bytes_written = .* B ctx; declared slope in B ctx: 0")
class CopiesInDisguise(Attention):
    """A view, it seems; but the heads of a token no longer lie together, and so `reshape` copies the cache."""

    laws = (CountLaw("bytes_written", grows_with=("B",)),)

    def attend(self, q, kv, batch):
        self.heads_first = kv.key.transpose(1, 2).reshape(-1)
        return torch.zeros_like(q)


class Nothing:
    """A kernel as the launch seam sees one."""

    __name__ = "nothing"

    def __getitem__(self, grid):
        return lambda *args, **meta: None


@faults.plant("test_count_laws[launches*", r"launches = .* B.*; declared slope in B: 0")
class LaunchesForEachRequest(VectorizedGather):
    def attend(self, q, kv, batch):
        for row in q:
            launch(Nothing(), (1,), row)
        return super().attend(q, kv, batch)


@faults.plant("test_count_laws[launches*", r"launches = .* B ctx; declared slope in B ctx: 0")
class LaunchesForEachBlock(VectorizedGather):
    def attend(self, q, kv, batch):
        for length in batch.seq_lens_host:
            for _ in range(0, length, kv.block_size):
                launch(Nothing(), (1,), q)
        return super().attend(q, kv, batch)


@faults.plant("test_count_laws[aten_calls*", r"aten_calls = .*; declared: .*B\*?\s?ctx")
class NoLongerNaive(VectorizedGather):
    """What a law promises must be there: a detector that sees no growth in naive gathering sees none anywhere."""

    laws = NaiveGather.laws


others = Faults(CountLaws)
"""Other kinds, counted in whole steps of an engine."""


@others.plant("test_count_laws[aten_calls*", r"aten_calls = .* B; declared slope in B: 0")
class SamplesRowByRow(DefaultSampler):
    def sample(self, logits, sampling):
        return Sampled(torch.cat([super(SamplesRowByRow, self).sample(row[None], None).tokens for row in logits]))


@others.plant("test_count_laws[python_calls*", r"python_calls = .* B; declared slope in B: 0")
class AllocatesRowByRow(PagedKVCache):
    def allocate(self, rows, lengths):
        one_by_one = zip(rows[:, None], lengths[:, None], strict=True)
        return all(super(AllocatesRowByRow, self).allocate(row, length) for row, length in one_by_one)


@others.plant("test_count_laws[python_calls*", r"python_calls = .* B ctx; .*declared slope in B ctx: 0")
class WalksAllBlocks(PagedKVCache):
    """As a check that was meant for tests does."""

    def allocate(self, rows, lengths):
        done = super().allocate(rows, lengths)
        for row, length in zip(rows, lengths, strict=True):
            for index in range(self.blocks_for(int(length))):
                self.look_at(row, index)
        return done

    def look_at(self, row, index):
        assert self.block_table[row, index] != NULL_BLOCK


@others.plant("test_count_laws[python_calls*", r"python_calls = .* B; declared slope in B: 0")
class AsksEachRequest(ContinuousScheduler):
    def schedule(self):
        self.longest = max((self.length(request) for request in self.table.requests if request), default=0)
        return super().schedule()

    def length(self, request):
        return len(request.prompt_ids)


@others.plant("test_count_laws[host_reads*", r"host_reads = .* B; declared slope in B: 0")
class LooksAtEachToken(EagerRunner):
    def submit(self, step):
        for row in step.rows:
            assert self._last_token[row].item() >= 0
        return super().submit(step)


@others.plant("test_count_laws[host_reads*", r"host_reads = .* B; declared slope in B: 0")
class LooksAtEachLength(TransformersModel):
    def forward(self, batch, attention, kv):
        assert all(length > 0 for length in batch.seq_lens)
        return super().forward(batch, attention, kv)


@pytest.mark.parametrize("fault", [*faults, *others], ids=str)
def test_is_found(fault):
    fault.must_be_found()
