"""Faults planted into right runners: the suite must find each, and say why."""

from dataclasses import fields, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from nanofw.batch import Batch, Sampling
from nanofw.runner import OnDevice, Runner, RunnerReport
from nanofw.sampler import Sampled
from nanofw.testing import RunnerSuite
from nanofw.testing.planted import Faults
from nanofw_basics.eager import EagerRunner
from nanofw_cudagraph.runner import CudaGraphRunner

faults = Faults(RunnerSuite)
graphs = Faults(RunnerSuite, options={"buckets": [1, 2, 4, 8], "contexts": [16]})


class Padded(Runner):
    """A right runner in pieces: decode is padded to a bucket, in buffers that stay. A fault may change any piece."""

    buckets = (1, 2, 4, 8)

    def __init__(self, parts, options):
        super().__init__(parts, options)
        self.report = RunnerReport("padded")
        self.last_token = torch.zeros(parts.rows + 1, dtype=torch.int64)  # padding leaves its token in the spare row
        self.buffers = {size: self.buffer(size) for size in self.buckets}

    @classmethod
    def validate(cls, parts):
        return [] if parts.attention.capabilities.graphs else ["attention that can be captured"]

    def buffer(self, size):
        columns = self.parts.kv_cache.block_table.shape[1]
        names = ("tokens", "positions", "slots", "rows", "seq_lens", "temperature", "top_k", "top_p", "seed")
        buffer = {name: torch.zeros(size, dtype=torch.int64) for name in names}
        buffer |= {name: torch.zeros(size) for name in ("temperature", "top_p")}
        return buffer | {"seq_lens": buffer["seq_lens"].int(), "table": torch.zeros(size, columns, dtype=torch.int32)}

    def submit(self, step):
        self.report.steps += 1
        if step.max_query_len > 1:
            return self.run_eagerly(step, self.last_token)
        if step.num_requests > self.buckets[-1]:
            return self.above(step)
        return self.padded(step, self.bucket(step.num_requests))

    def above(self, step):
        self.report.fallbacks["too large"] = self.report.fallbacks.get("too large", 0) + 1
        return self.run_eagerly(step, self.last_token)

    def bucket(self, count):
        return next(size for size in self.buckets if size >= count)

    @torch.inference_mode()
    def padded(self, step, size):
        parts, count, buffer = self.parts, step.num_requests, self.buffers[size]
        self.pad(buffer, count)
        self.fill(buffer, step)
        self.feed(buffer, step)
        batch = self.batch(buffer, size)
        logits = parts.model.forward(batch.with_plan(self.plan(batch)), parts.attention, parts.kv_cache.layers)
        sampled = parts.sampler.sample(logits, self.sampling(buffer, step))
        self.last_token.index_copy_(0, buffer["rows"], sampled.tokens)
        return self.results(sampled, count)

    def pad(self, buffer, count):
        for name, filler in {"tokens": 0, "positions": 0, "slots": -1, "rows": self.parts.rows, "seq_lens": 0}.items():
            buffer[name][count:] = filler
        buffer["table"][:] = 0

    def fill(self, buffer, step):
        count = step.num_requests
        named = {"tokens": step.token_ids, "positions": step.positions, "slots": step.slot_mapping}
        for name, values in (named | {"rows": step.rows, "seq_lens": step.seq_lens}).items():
            buffer[name][:count] = torch.from_numpy(np.array(values))
        buffer["table"][:count, : step.block_table.shape[1]] = torch.from_numpy(step.block_table)
        if step.sampling is not None:
            for name in ("temperature", "top_k", "top_p", "seed"):
                buffer[name][:count] = torch.from_numpy(getattr(step.sampling, name))

    def feed(self, buffer, step):
        buffer["tokens"][step.feeds] = self.last_token[step.rows[step.feeds]]

    def batch(self, buffer, size):
        columns, block_size = buffer["table"].shape[1], self.parts.kv_cache.block_size
        return Batch(
            token_ids=buffer["tokens"],
            positions=buffer["positions"],
            slot_mapping=buffer["slots"],
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32),
            seq_lens=buffer["seq_lens"],
            block_table=buffer["table"],
            logits_indices=torch.arange(size),
            max_query_len=1,
            max_seq_len=columns * block_size,
            query_lens_host=np.ones(size, np.int64),
            seq_lens_host=np.full(size, columns * block_size),
            num_padding=size,
        )

    def plan(self, batch):
        return self.parts.attention.plan(batch)

    def sampling(self, buffer, step):
        if step.sampling is None:
            return None
        names = ("temperature", "top_k", "top_p", "seed")
        return replace(step.sampling, **{name: buffer[name] for name in names}, position=buffer["seq_lens"].long())

    def results(self, sampled, count):
        return OnDevice(rows_of(sampled, slice(count)))


def rows_of(sampled, rows):
    return Sampled(*(None if (value := getattr(sampled, f.name)) is None else value[rows] for f in fields(Sampled)))


class TestPadded(RunnerSuite):
    """What the faults are planted into is right."""

    backend = Padded


@faults.plant("test_only_live_slots_are_written[3]", r"3 requests: slots \[27\] were written, the step's are")
@faults.plant("test_only_live_slots_are_written[5]", r"5 requests: slots \[43\] were written")
class PaddingIsTheLastSlot(Padded):
    """A4, vllm#43810: slot -1 is used as an index."""

    def batch(self, buffer, size):
        return replace(super().batch(buffer, size), num_padding=0)


@faults.plant("test_only_live_slots_are_written[3]", r"slots \[0\] were written")
@faults.plant("test_padding_reaches_nobody[3-nan]", "the null block was written|tokens are not those")
class PaddingSinksIntoSlotZero(Padded):
    """A4, sglang#32477: the null block fills with whatever padding holds."""

    def pad(self, buffer, count):
        super().pad(buffer, count)
        buffer["slots"][count:] = 0


@faults.plant("test_a_larger_step_before_leaves_nothing", r"slots \[.*\] were written")
class StaleSlots(Padded):
    """What a larger step left in the buffer is written again."""

    def pad(self, buffer, count):
        slots = buffer["slots"].clone()
        super().pad(buffer, count)
        buffer["slots"].copy_(slots)


@faults.plant("test_batches_say_what_the_step_says[3]", "padding has a context")
class StaleLengths(Padded):
    def pad(self, buffer, count):
        super().pad(buffer, count)
        buffer["seq_lens"][count:] = 5


@faults.plant("test_every_batch_size_with_a_step_in_flight[3]", "tokens are not those of eager steps")
class PaddingLeavesItsTokenInARow(Padded):
    """The spare row is a request's."""

    def pad(self, buffer, count):
        super().pad(buffer, count)
        buffer["rows"][count:] = 0


@faults.plant("test_every_batch_size[3]", "IndexError|RuntimeError|tokens")
class TakesTheBucketBelow(Padded):
    def bucket(self, count):
        return max(size for size in self.buckets if size <= count)


@faults.plant("test_every_batch_size[9]", r"tokens are \(8,\) int64, must be \(9,\) int64")
@faults.plant("test_steps_above_the_largest_bucket_are_counted", r"tokens are \(8,\)")
class CutsTheBatch(Padded):
    """vllm#7999: nine requests in the bucket of eight."""

    def above(self, step):
        first = {name: getattr(step, name)[:8] for name in ("rows", "tickets", "query_lens", "seq_lens", "emits")}
        tokens, table = step.num_tokens, step.block_table[:8]
        wide = np.concatenate([step.wide[k * tokens : k * tokens + 8] for k in range(4)])
        narrow = np.concatenate([np.arange(9), step.seq_lens[:8], table.ravel()]).astype(np.int32)
        feeds = step.feeds[step.feeds < 8]
        self.report.fallbacks["cut"] = self.report.fallbacks.get("cut", 0) + 1
        return self.padded(replace(step, **first, wide=wide, narrow=narrow, feeds=feeds, num_tokens=8), 8)


@faults.plant("test_steps_above_the_largest_bucket_are_counted", r"3 steps of 9 requests: \{\}")
class FallsBackInSilence(Padded):
    """sglang#33900."""

    def above(self, step):
        return self.run_eagerly(step, self.last_token)


@faults.plant("test_steps_above_the_largest_bucket_are_counted", "steps that fit are counted as fallbacks")
class CountsEverything(Padded):
    def submit(self, step):
        self.report.fallbacks["decode"] = self.report.fallbacks.get("decode", 0) + 1
        return super().submit(step)


@faults.plant("test_every_batch_size_with_a_step_in_flight[2]", r"2 fed on the device\): tokens are not those")
class IgnoresFeeds(Padded):
    def feed(self, buffer, step):
        buffer["tokens"][step.feeds] = 0


@faults.plant("test_only_some_tokens_are_fed", "tokens are not those of eager steps")
class FeedsEverybody(Padded):
    """The last token of the row, wherever the request's last token was computed."""

    def submit(self, step):
        last = self.last_token.clone()
        pending = super().submit(step)
        self.last_token[: self.parts.rows] = last.roll(1)[: self.parts.rows]
        return pending


@faults.plant("test_only_some_tokens_are_fed", "tokens are not those of eager steps")
@faults.plant("test_order_and_rows_change", "tokens are not those of eager steps")
class FeedsByPlace(Padded):
    """The last tokens are kept by place in the batch."""

    def feed(self, buffer, step):
        buffer["tokens"][step.feeds] = self.last_token[step.feeds]


@faults.plant("test_mixed_steps[3]", "tokens are not those of eager steps")
class PrefillFeedsNobody(Padded):
    """A step with prefill keeps its tokens to itself."""

    def run_eagerly(self, step, last_token):
        return super().run_eagerly(step, last_token.clone())


@faults.plant("test_rows_change_hands_in_flight", "tokens are not those of eager steps")
class StoresTokensWhenTheyAreWaitedFor(Padded):
    """By then the row may be another request's, or have a later token."""

    def submit(self, step):
        pending = super().submit(step)
        wait = pending.wait

        def store():
            found = wait()
            self.last_token[step.rows] = torch.from_numpy(found.tokens)
            return found

        pending.wait = store
        return pending


@faults.plant("test_every_batch_size_with_a_step_in_flight[4]", "tokens are not those of eager steps")
class ResultsAreOverwritten(Padded):
    """The tokens of each step lie in the same buffer: who waits late gets those of the next."""

    def results(self, sampled, count):
        static = self.buffers[8].setdefault("results", torch.zeros(8, dtype=torch.int64))
        static[:count] = sampled.tokens[:count]
        return OnDevice(replace(rows_of(sampled, slice(count)), tokens=static[:count]))


@faults.plant("test_log_probabilities[1]", "logprobs are not those of eager steps")
class LogprobsAreOverwritten(Padded):
    def results(self, sampled, count):
        if sampled.logprobs is None:
            return super().results(sampled, count)
        static = self.buffers[8].setdefault("logprobs", torch.zeros(8))
        static[:count] = sampled.logprobs[:count]
        return OnDevice(replace(rows_of(sampled, slice(count)), logprobs=static[:count]))


@faults.plant("test_block_tables_grow[*]", "tokens are not those of eager steps|RuntimeError")
class TableOfSixteenTokens(Padded):
    """Columns beyond those that were there at first are left out."""

    def fill(self, buffer, step):
        super().fill(buffer, step)
        buffer["table"][:, 4:] = 0


@faults.plant("test_batches_say_what_the_step_says[1]", r"max_seq_len is \d+")
class BoundOfTheFirstStep(Padded):
    """vllm-like: bounds are those of the step that was captured."""

    def batch(self, buffer, size):
        return replace(super().batch(buffer, size), max_seq_len=min(16, int(buffer["seq_lens"].max()) - 1 or 16))


@faults.plant("test_ways_to_sample_share_a_batch[0]", "tokens are not those of eager steps")
class SamplingOfTheFirstStep(Padded):
    """Parameters are those of the step that was captured."""

    def sampling(self, buffer, step):
        found = super().sampling(buffer, step)
        if found is None:
            return None
        kept = {f.name: getattr(found, f.name) for f in fields(Sampling)}
        kept = {name: value.clone() for name, value in kept.items() if isinstance(value, torch.Tensor)}
        return replace(found, **buffer.setdefault("first", kept))


@faults.plant("test_prompts_are_scored", "scores of the prompt are missing")
class ForgetsScores(Padded):
    """By its tokens alone, a chunk of one token is a step of decode."""

    def submit(self, step):
        return super().submit(replace(step, max_query_len=int(step.query_lens.max())))


@faults.plant("test_every_batch_size[*]", "tokens are not those of eager steps|RuntimeError|IndexError")
class KeepsItsPlan(Padded):
    """The plan is made once a bucket, of the first step's lengths."""

    def plan(self, batch):
        plan = super().plan(batch)
        plan = replace(plan, position=plan.position.clone(), table=plan.table.clone())
        return self.buffers[batch.num_requests].setdefault("plan", plan)


@faults.plant("test_every_batch_size[1]", "AttributeError: 'NoneType'")
class MakesNoPlan(Padded):
    def plan(self, batch):
        return None


@faults.plant("test_warming_up_leaves_no_trace", r"warm_up\(\) writes into the cache, at slots \[4\]")
class WarmsUpInABlock(Padded):
    def warm_up(self):
        for layer in self.parts.kv_cache.layers:
            layer.key[1, 0] = 0


@faults.plant("test_warming_up_leaves_no_trace", r"warm_up\(\) is counted as steps")
class CountsItsWarmUp(Padded):
    def warm_up(self):
        self.report.steps += len(self.buckets)


@faults.plant("test_two_runners_side_by_side", "tokens are not those of eager steps")
class SharesLastTokens(Padded):
    """One buffer for all runners of the process."""

    shared: ClassVar = torch.zeros(64, dtype=torch.int64)

    def __init__(self, parts, options):
        super().__init__(parts, options)
        self.last_token = self.shared


@faults.plant("test_the_report", r"\[9, 9\] == \[5, 5\]|\[10, 10\] == \[5, 5\]")
class SharesItsReport(Padded):
    one: ClassVar = RunnerReport("padded")

    def __init__(self, parts, options):
        super().__init__(parts, options)
        self.report = self.one


@faults.plant("test_refuses_what_it_would_get_wrong", "tokens are not those of eager steps")
class RefusesNothing(Padded):
    """An attention that reads the host's lengths gets those of the bucket."""

    @classmethod
    def validate(cls, parts):
        return []


@faults.plant("test_refuses_what_it_would_get_wrong", "reasons must be texts")
class RefusesWithoutAReason(Padded):
    @classmethod
    def validate(cls, parts):
        return [] if parts.attention.capabilities.graphs else [""]


@faults.plant("test_an_error_is_the_plugins_own", "the model ran out of memory, of which the runner made None")
class SwallowsErrors(EagerRunner):
    def submit(self, step):
        try:
            return super().submit(step)
        except torch.OutOfMemoryError:
            return OnDevice(Sampled(torch.zeros(step.num_requests, dtype=torch.int64)))


@faults.plant("test_an_error_is_the_plugins_own", r"the runner made RuntimeError\('step failed'\)")
class RenamesErrors(EagerRunner):
    def submit(self, step):
        try:
            return super().submit(step)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("step failed") from error


@faults.plant("test_nothing_is_recorded_for_gradients", "logits keep a graph for gradients")
class RecordsGradients(Padded):
    """As `Padded`, outside of inference mode."""

    def padded(self, step, size):
        with torch.inference_mode(False), torch.enable_grad():
            return Padded.padded.__wrapped__(self, step, size)


@graphs.plant("test_every_batch_size[3]", "tokens are not those of eager steps")
class FillsItsInputsOnce(CudaGraphRunner):
    def _find(self, step):
        found = super()._find(step)
        if found.inputs._turn:
            found.inputs.fill = lambda step: None
        return found


@graphs.plant("test_ways_to_sample_share_a_batch[0]", "tokens are not those of eager steps")
class OneGraphForAllWays(CudaGraphRunner):
    """A graph is found by its size alone: it samples as the step did that was captured."""

    def _find(self, step):
        known = [graph for key, graph in self._captured.items() if key[0] >= step.num_requests]
        return known[0] if known else super()._find(step)


@pytest.mark.parametrize("fault", [*faults, *graphs], ids=str)
def test_is_found(fault):
    fault.must_be_found()


def test_every_check_finds_something():
    """A check that no fault has ever failed proves nothing."""
    found = {"test_count_laws"} | {
        fault.check.partition("[")[0] for fault in (*faults, *graphs)
    }  # laws: test_law_mutations.py
    assert found == {name for name in dir(RunnerSuite) if name.startswith("test_")}
