"""Numerical and memory faults, planted into a right attention one at a time: the suite must find each, and say why."""

from dataclasses import replace

import pytest
import torch

from nanofw import CountLaw
from nanofw.attention import Attention, Capabilities
from nanofw.testing import AttentionSuite
from nanofw.testing.planted import Faults


class Plain(Attention):
    """A right attention, one request after another, in pieces that a fault can replace one by one."""

    capabilities = Capabilities(windows=True, soft_cap=True, batch_invariant=True, reads_padding=False)
    laws = (CountLaw("aten_calls", grows_with=("B",)), CountLaw("python_calls", grows_with=("B",)))

    def attend(self, q, kv, batch):
        self.batch, out, start = batch, torch.zeros_like(q), 0
        for table, n, s in zip(batch.block_table, batch.query_lens_host, batch.seq_lens_host, strict=True):
            if s:
                out[start : start + n] = self.one(q[start : start + n], *self.gather(kv, table, int(s)), kv.spec)
            start += n
        return out

    def one(self, q, k, v, spec):
        k, v = (self.share(x, q.shape[1] // x.shape[1]).float() for x in (k, v))
        scores = self.cap(self.scores(q.float(), k, spec), spec)
        weights = scores.masked_fill(self.hidden(len(q), len(k), spec.window), float("-inf")).softmax(-1)
        return self.weigh(weights, v).to(q.dtype)

    def gather(self, kv, table, length):
        """K and V `[s, Hkv, D]` of one request."""
        position = torch.arange(length)
        block, offset = table[position // kv.block_size].long(), position % kv.block_size
        return kv.key[block, offset], kv.value[block, offset]

    def share(self, x, group):
        """Each key/value head for the query heads it belongs to."""
        return x.repeat_interleave(group, dim=1)

    def scores(self, q, k, spec):
        return torch.einsum("nhd,shd->hns", q, k) * spec.scale

    def cap(self, scores, spec):
        return scores if spec.soft_cap is None else spec.soft_cap * torch.tanh(scores / spec.soft_cap)

    def hidden(self, n, s, window):
        """`[n, s]`: which keys each of the last n positions must not see."""
        query, key = torch.arange(s - n, s)[:, None], torch.arange(s)
        return (key > query) if window is None else (key > query) | (key <= query - window)

    def weigh(self, weights, v):
        return torch.einsum("hns,shd->nhd", weights, v)


class TestPlain(AttentionSuite):
    """What the faults are planted into is right."""

    backend = Plain


faults = Faults(AttentionSuite)


# Which keys are seen


@faults.plant("test_one_key_dominates[fp32-*-c16]", "key 15 of 16 has all the weight, but its value is not the output")
class DropsTheLastKey(Plain):
    def hidden(self, n, s, window):
        return super().hidden(n, s, window) | ((torch.arange(s) == s - 1) & (s > 1))


@faults.plant("test_one_key_dominates[fp32-*-c16]", "key 0 of 16 has all the weight")
class DropsTheFirstKey(Plain):
    def hidden(self, n, s, window):
        return super().hidden(n, s, window) | ((torch.arange(s) == 0) & (torch.arange(s - n, s)[:, None] > 0))


@faults.plant("test_no_query_sees_the_future", r"key 1 is hidden from queries \[0\]")
class SeesOneKeyAhead(Plain):
    def hidden(self, n, s, window):
        return super().hidden(n, s, window).roll(1, dims=1) & (torch.arange(s) > 0)


@faults.plant("test_chunked_prefill*", r"request 0 \(16 queries, context 21\): off by")
class CountsQueriesFromZero(Plain):
    """Causal inside a chunk, as if nothing came before it (transformers#41184)."""

    def hidden(self, n, s, window):
        return torch.arange(s) > torch.arange(n)[:, None]


@faults.plant("test_window_in_decode*", r"\(1 queries, context 17\): off by")
class WindowTooWide(Plain):
    def hidden(self, n, s, window):
        return super().hidden(n, s, window and window + (n == 1))


@faults.plant("test_window_in_decode*", "off by")
class WindowTooNarrow(Plain):
    """The oldest key of the window is lost in decode (sglang#32087)."""

    def hidden(self, n, s, window):
        return super().hidden(n, s, window and max(window - (n == 1), 1))


@faults.plant("test_window_in_decode*", "off by")
class WindowInPrefillOnly(Plain):
    """mistral.rs#2094."""

    def hidden(self, n, s, window):
        return super().hidden(n, s, window if n > 1 else None)


@faults.plant("test_window_in_decode[fp32-*", "reaches the query at position")
class HidesByAPenalty(Plain):
    """A key outside the window gets a score 18 lower, not minus infinity: too little for any tolerance."""

    def one(self, q, k, v, spec):
        self.penalty = -18.0 * (self.hidden(len(q), len(k), spec.window) ^ super().hidden(len(q), len(k), None))
        return super().one(q, k, v, replace(spec, window=None))

    def cap(self, scores, spec):
        return super().cap(scores, spec) + self.penalty


@faults.plant("test_wide_window_is_none", "window of 33.*off by")
class WindowAsLongAsTheContext(Plain):
    """A window that reaches just to the first key loses it."""

    def hidden(self, n, s, window):
        return super().hidden(n, s, window - 1 if window == s else window)


# Numbers


@faults.plant("test_head_ratios_match*", "head 1, dim")
class WrongKeyValueHead(Plain):
    def share(self, x, group):
        return x.repeat(1, group, 1)


@faults.plant("test_decode_matches[fp32-*]", "off by .* is allowed")
class TwoPercentTooLarge(Plain):
    def scores(self, q, k, spec):
        return 1.02 * super().scores(q, k, spec)


@faults.plant("test_decode_matches[bf16-*]", "off by .* is allowed")
class TwoPercentInHalfPrecision(TwoPercentTooLarge):
    """Where a fixed tolerance of 1e-2 would have to let it pass."""


@faults.plant("test_decode_matches[fp32-d128-*]", "d128.*off by")
class ReadsTheLowerHalf(Plain):
    """Channels beyond the first 64 are ignored (triton#621)."""

    def scores(self, q, k, spec):
        return super().scores(q[..., :64], k[..., :64], spec)


@faults.plant("test_decode_matches[fp32-d96-*]", "off by")
class ReadsPastTheHead(Plain):
    """A head size of 96 is taken for 128, its next power of two: channels of the next head count (sglang#1281)."""

    def share(self, x, group):
        size = x.shape[-1]
        wide = torch.cat((x, x.roll(-1, dims=1)[..., : (1 << (size - 1).bit_length()) - size]), -1)
        return super().share(wide, group)

    def scores(self, q, k, spec):
        spare = k.shape[-1] - q.shape[-1]
        return super().scores(torch.cat((q, q[..., :spare]), -1), k, spec)

    def weigh(self, weights, v):
        return super().weigh(weights, v)[..., : self.spec.layers[0].head_size]


@faults.plant("test_profiles_match[fp16-*-sharp-*]", "NaN")
class SoftmaxInHalfPrecision(Plain):
    """Without taking off the maximum: large logits overflow."""

    def one(self, q, k, v, spec):
        k, v = (self.share(x, q.shape[1] // x.shape[1]) for x in (k, v))
        scores = self.cap(self.scores(q, k, spec), spec)
        weights = scores.masked_fill(self.hidden(len(q), len(k), spec.window), float("-inf")).exp()
        return self.weigh(weights / weights.sum(-1, keepdim=True), v)


@faults.plant("test_soft_cap[*", "cap5.*off by")
class SoftCapIgnored(Plain):
    """sgl-kernel-xpu#491."""

    def cap(self, scores, spec):
        return scores


@faults.plant("test_soft_cap_comes_before_the_mask", "off by")
class CapsAfterMasking(Plain):
    """What is hidden gets the score -cap, not minus infinity."""

    def one(self, q, k, v, spec):
        k, v = (self.share(x, q.shape[1] // x.shape[1]).float() for x in (k, v))
        hidden = self.hidden(len(q), len(k), spec.window)
        scores = self.scores(q.float(), k, spec).masked_fill(hidden, float("-inf"))
        return self.weigh(self.cap(scores, spec).softmax(-1), v).to(q.dtype)


# What is read


@faults.plant("test_unused_memory_is_not_seen*", "unused slots filled with -7.0 instead of 30")
class ReadsUnusedSlots(Plain):
    """Attends over whole blocks."""

    def gather(self, kv, table, length):
        return super().gather(kv, table, -(-length // kv.block_size) * kv.block_size)

    def hidden(self, n, s, window):
        return torch.zeros(n, s, dtype=torch.bool)


@faults.plant("test_unused_memory_is_not_seen*", "unused slots filled with nan instead of 30")
class LetsNaNThrough(Plain):
    """Masks scores, but multiplies unused values by zero, and yet declares `reads_padding=False` (sglang#32477)."""

    def gather(self, kv, table, length):
        self.length = length
        return super().gather(kv, table, -(-length // kv.block_size) * kv.block_size)

    def hidden(self, n, s, window):
        spare = torch.ones(n, s - self.length, dtype=torch.bool)
        return torch.cat((super().hidden(n, self.length, window), spare), 1)


@faults.plant("test_unused_memory_is_not_seen*", "other bits")
class ReadsTheTail(Plain):
    """Takes the last column of the block table for the last block, whatever the length."""

    def gather(self, kv, table, length):
        table = table.clone()
        table[(length - 1) // kv.block_size] = table[-1]
        return super().gather(kv, table, length)


@faults.plant("test_full_blocks_match*", "off by")
class FullBlockIsEmpty(Plain):
    """Tokens in the last block: length modulo block size, which is 0 for a full one (MinivLLM#77)."""

    def hidden(self, n, s, window):
        block = self.spec.block_size
        return super().hidden(n, s, window) | ((s % block == 0) & (s > block) & (torch.arange(s) >= s - block))


@faults.plant("test_blocks_in_any_order*", "other blocks")
class ReadsBlocksInOrder(Plain):
    def gather(self, kv, table, length):
        return super().gather(kv, table[: -(-length // kv.block_size)].sort().values, length)


@faults.plant("test_gaps_between_blocks*", "a gap.*other bits")
class IgnoresTheStride(Plain):
    """Takes blocks for neighbours in memory (vllm-xpu-kernels#445)."""

    def gather(self, kv, table, length):
        dense = [
            x.as_strided(x.shape, x[0].contiguous()[None].expand_as(x).contiguous().stride())
            for x in (kv.key, kv.value)
        ]
        return super().gather(replace(kv, key=dense[0], value=dense[1]), table, length)


@faults.plant("test_addresses_beyond_int32*", "beyond element 2\\*\\*31.*other bits")
class AddressesInInt32(Plain):
    """Block id times stride, in the block table's own int32 (vllm#47671)."""

    def gather(self, kv, table, length):
        return [self.read(pool, table)[:length] for pool in (kv.key, kv.value)]

    def read(self, pool, table):
        starts = (table * torch.tensor(pool.stride(0), dtype=torch.int32)).long() + pool.storage_offset()
        return torch.cat([pool.as_strided(pool.shape[1:], pool.stride()[1:], start) for start in starts.tolist()])


@faults.plant("test_strided_inputs_match", "off by")
class TakesInputsForPacked(Plain):
    """Reads q as if its memory were one dense block."""

    def attend(self, q, kv, batch):
        return super().attend(q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1)), kv, batch)


@faults.plant("test_loose_bounds_match", "off by|out of bounds")
class TakesBoundsForLengths(Plain):
    """A bucket's bound on the context, as if some request had it."""

    def gather(self, kv, table, length):
        longest = length == self.batch.seq_lens_host.max()
        return super().gather(kv, table, self.batch.max_seq_len if longest else length)


# What is written


@faults.plant("test_writes_only_its_slots*", r"slot 159 of the key cache \(block 9\)")
class MinusOneIsAnIndex(Plain):
    """Padding writes to the last slot of the last block (vllm#43810)."""

    def write_kv(self, k, v, kv, batch):
        for cache, new in ((kv.key, k), (kv.value, v)):
            cache[batch.slot_mapping // kv.block_size, batch.slot_mapping % kv.block_size] = new


@faults.plant("test_writes_only_its_slots*", "of the value cache .* does not hold its token")
class RoundsWhatItStores(Plain):
    def write_kv(self, k, v, kv, batch):
        super().write_kv(k, v.half().to(v.dtype) if v.dtype == torch.float32 else v * 1.01, kv, batch)


@faults.plant("test_writes_stay_inside[fp32-d96-*", r"values after the buffer .* were overwritten")
class WritesPastTheHead(Plain):
    """Each output row as wide as the next power of two, without a mask (sglang#1281)."""

    def attend(self, q, kv, batch):
        found = super().attend(q, kv, batch)
        out = torch.empty_like(found)
        size = q.shape[-1]
        for row in range(q.shape[0] * q.shape[1]):
            wide = out.as_strided((1 << (size - 1).bit_length(),), (1,), out.storage_offset() + row * size)
            wide.zero_()[:size] = found.flatten(0, 1)[row]
        return out


@faults.plant("test_writes_stay_inside[*", "canaries after each block of the key cache")
class WritesPastTheBlock(Plain):
    def write_kv(self, k, v, kv, batch):
        super().write_kv(k, v, kv, batch)
        size = kv.key[0].numel()
        kv.key.as_strided((kv.key.shape[0], size + 1), (kv.key.stride(0), 1))[:, size:] = 0


@faults.plant("test_decoding_follows_prefill", "off by|NaN")
class AttendsBeforeItWrites(Plain):
    def forward(self, q, k, v, kv, batch):
        out = self.attend(q, kv, batch)
        self.write_kv(k, v, kv, batch)
        return out


# Padding, company, repetition, promises


@faults.plant("test_padding_rows_are_not_seen*", "rows of padding requests are not zero")
class LeavesPaddingAsItIs(Plain):
    def attend(self, q, kv, batch):
        live = (batch.slot_mapping >= 0)[:, None, None]
        return torch.where(live, super().attend(q, kv, batch), q)


@faults.plant("test_padding_rows_are_not_seen*", "NaN in padding rows reaches live rows")
class ScalesByTheWholeBatch(Plain):
    """One scale for all rows, as a quantised kernel may have it, padding included."""

    def attend(self, q, kv, batch):
        scale = q.abs().amax()
        out = super().attend(q / scale, kv, batch) * 1.0
        return torch.where((batch.slot_mapping >= 0)[:, None, None], out * scale / scale, 0)


@faults.plant("test_company_changes_no_bit*", "alone and in company.*other bits")
class AddsInTheOrderOfTheBatch(Plain):
    """Cuts the context into as many parts as there are requests, and declares `batch_invariant`."""

    def weigh(self, weights, v):
        parts = self.batch.num_requests
        return sum(
            super(AddsInTheOrderOfTheBatch, self).weigh(w, x)
            for w, x in zip(weights.chunk(parts, 2), v.chunk(parts), strict=True)
        )


@faults.plant("test_same_bits_twice[*", "a second run.*other bits")
class AddsInAnyOrder(Plain):
    """As atomic additions do."""

    def weigh(self, weights, v):
        order = torch.randperm(len(v))
        return super().weigh(weights[..., order], v[order])


@faults.plant("test_decode_matches[fp16-*", r"output is \(\d+, 8, 64\) float32 on cpu, must be .* float16")
class AnswersInFloat32(Plain):
    def attend(self, q, kv, batch):
        return super().attend(q, kv, batch).float()


@faults.plant("test_refuses_what_it_does_not_declare[soft-cap]", "not declared, yet validate\\(\\) gives no reason")
class RefusesNothing(Plain):
    capabilities = Capabilities(soft_cap=False)

    @classmethod
    def validate(cls, spec):
        return []


@faults.plant("test_refuses_what_it_does_not_declare[head-size-100]", "declared, yet refused: powers of two only")
class RefusesWhatItDeclares(Plain):
    @classmethod
    def validate(cls, spec):
        odd = any(layer.head_size & (layer.head_size - 1) for layer in spec.layers)
        return [*super().validate(spec), *(["powers of two only"] if odd else [])]


@pytest.mark.parametrize("fault", faults, ids=str)
def test_is_found(fault):
    fault.must_be_found()
