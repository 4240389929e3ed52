"""What an attention reads and writes: padding, stale slots, block order, slot -1, addresses beyond 2**31, company."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nanofw.kv_cache import LayerKV
from nanofw.testing.attention_base import AttentionBase, one_at_a_time, run
from nanofw.testing.cases import DTYPES, Case, dtype_names
from nanofw.testing.layout import Layout, fetch, lay_out, pools, store
from nanofw.testing.suite import cases
from nanofw.testing.tolerance import bits, check_same_bits

FAR = 2**31


def shapes(suite: type[AttentionBase]) -> Iterator[Case]:
    """Decode, prefill and a mixed batch, each with padding, in each declared dtype."""
    block = suite.block()
    contexts = (block, 3 * block + 1, 1, 2 * block - 1)
    for dtype in dtype_names(suite.can()):
        for queries in ((1, 1, 1, 1), contexts, (1, 9, 1, 2 * block - 1)):
            yield suite.case(contexts, queries, dtype=dtype, padding=2, seed=sum(queries))


class Memory(AttentionBase):
    """Nothing that is not a request's own reaches its output, and nothing but its own slots is written."""

    @cases(shapes)
    def test_unused_memory_is_not_seen(self, case: Case) -> None:
        """Poison: unused slots and table tails hold two different values, and no bit changes.

        Fails if a slot beyond the context takes part, were it with weight 0. Only a backend that declares
        `reads_padding=False` must also withstand NaN there. Sources: sglang#32477, #35351.
        """
        poisons = [-7.0] if self.can().reads_padding else [-7.0, math.nan]
        for poison in poisons:
            other = Layout(fill=poison, columns=2, spare_tails=True)
            self.check_same(case, Layout(fill=30.0), other, f"{case}: unused slots filled with {poison} instead of 30")

    @cases(shapes)
    def test_padding_rows_are_not_seen(self, case: Case) -> None:
        """NaN in the q, k and v of padding rows: live rows keep their bits, padding rows come out as zero.

        Fails if padding shares a sum, a maximum or a slot with live rows. Source: vllm#43810.
        """
        attention = self.build(case.spec(self.torch_device()))
        dense, outputs = self.numbers(case), []
        for value in (0.0, math.nan):
            problem = lay_out(case, dense, Layout(padding_fill=value))
            out = run(attention, problem)
            outputs.append(out[: problem.live_tokens])
            padding = out[problem.live_tokens :]
            if not torch.equal(padding, torch.zeros_like(padding)):
                raise AssertionError(f"{case}: rows of padding requests are not zero, with {value} as their input")
        check_same_bits(outputs[1], outputs[0], f"{case}: NaN in padding rows reaches live rows")

    @cases(shapes)
    def test_blocks_in_any_order(self, case: Case) -> None:
        """The same numbers in other blocks of the pool: no bit changes.

        Fails if blocks are taken to be adjacent, or the table is read in another order. Source: PagedAttention (Kwon et
        al., SOSP 2023).
        """
        for order in (1, 2):
            self.check_same(case, Layout(), Layout(order=order, first_block=1 + order), f"{case}: other blocks")

    @cases(shapes)
    def test_gaps_between_blocks(self, case: Case) -> None:
        """Layers that share one allocation leave gaps between blocks: no bit changes.

        Fails if the stride of a block is computed from its sizes. Source: vllm-xpu-kernels#445.
        """
        self.check_same(case, Layout(), Layout(gap=case.kv_heads * case.head_size * 3, fill=5.0), f"{case}: a gap")

    @cases(shapes)
    def test_same_bits_twice(self, case: Case) -> None:
        """Deterministic: the same step twice gives the same bits.

        Fails for sums in no fixed order (atomics) and for races. Source: the contract of samplers, whose draws repeat
        only if logits do.
        """
        self.check_same(case, Layout(), Layout(), f"{case}: a second run")

    @cases(shapes)
    def test_writes_only_its_slots(self, case: Case) -> None:
        """Bytes of the whole pool differ only at the slots of live tokens, and hold exactly their k and v.

        Fails if slot -1 is used as an index: it then means the pool's last slot, which belongs to a request here. Once
        through `forward`, once through `write_kv`. Source: vllm#43810.
        """
        attention, dense = self.build(case.spec(self.torch_device())), self.numbers(case)
        for write_only in (False, True):
            problem = lay_out(case, dense, Layout(fill=0.75, padding_fill=math.nan, gap=8))
            before = [pool.clone() for pool in pools(problem.kv)]
            if write_only:
                attention.write_kv(problem.k, problem.v, problem.kv, problem.batch)
            else:
                run(attention, problem)
            check_written(problem.kv, problem.slots, problem.k, problem.v, before, str(case))

    @cases(shapes)
    def test_company_changes_no_bit(self, case: Case) -> None:
        """Batch invariance, where it is declared: a request has the same bits alone and in any company.

        Fails if tiles or splits, and so the order of a sum, depend on the rest of the batch. Source:
        transformers#25921.
        """
        if not self.can().batch_invariant:
            pytest.skip(f"{self.backend.__name__} does not declare batch invariance")
        dense = self.numbers(case)
        together = self.attend(case, dense).split_with_sizes(list(case.query_lens))
        for request, expected in enumerate(together):
            alone = self.attend(one_at_a_time(case, request), dense.only(request))
            check_same_bits(alone, expected, f"{case}: request {request} alone and in company")

    @cases(lambda suite: ("many-blocks", "wide-stride"))
    def test_addresses_beyond_int32(self, case: str) -> None:
        """Blocks beyond element 2**31 of the pool read and write like any other.

        Fails if block id times stride is computed in 32 bits. Costs address space, not memory, on a CPU; on a GPU,
        memory. Source: vllm#47671.
        """
        shape = self.case((40, self.block()), (1, 3), heads=8, kv_heads=8)
        sizes = self.can().head_sizes
        shape = replace(shape, head_size=128 if sizes is None or 128 in sizes else 64)
        attention, dense = self.build(shape.spec(self.torch_device())), self.numbers(shape)
        near = lay_out(shape, dense)
        expected = run(attention, near)
        block = shape.block_size * shape.kv_heads * shape.head_size
        stride = block if case == "many-blocks" else FAR // 4 + block
        first = FAR // stride - 1
        layout = Layout(first_block=first)
        kv = far_kv(shape, self.torch_device(), stride, first + 8)
        for low in range(4):  # where a wrapped offset might land
            kv.key[low], kv.value[low] = 3.0, -3.0
        problem = lay_out(shape, dense, layout, kv=kv)
        got = run(attention, problem)
        check_same_bits(got, expected, f"{shape}: blocks {problem.tables} of stride {stride}, beyond element 2**31")
        keys, values = fetch(kv, problem.slots)
        check_same_bits(keys, problem.k[: len(keys)], f"{shape}: keys written beyond element 2**31")
        check_same_bits(values, problem.v[: len(values)], f"{shape}: values written beyond element 2**31")


def check_written(
    kv: LayerKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: list[torch.Tensor], what: str
) -> None:
    """The pool is as it was before, but for `slots`, which hold k and v (rows beyond them are padding)."""
    key, value = (b[:, : kv.key[0].numel()].view(kv.key.shape) for b in before)
    expected = LayerKV(0, kv.spec, key, value, kv.block_size)
    store(expected, slots, k[: len(slots)], v[: len(slots)])
    for name, got, wanted in zip(("key", "value"), pools(kv), before, strict=True):
        different = (bits(got) != bits(wanted)).nonzero()
        if len(different):
            block, element = different[0].tolist()
            slot = block * kv.block_size + element // kv.key[0, 0].numel()
            state = "does not hold its token" if slot in slots.tolist() else "is written, although no live token is its"
            raise AssertionError(f"{what}: slot {slot} of the {name} cache (block {block}) {state}")


def far_kv(case: Case, device: torch.device, stride: int, num_blocks: int) -> LayerKV:
    """A cache whose last blocks lie beyond element 2**31, in address space that costs no memory until it is touched.

    As much space lies before it, so that an offset that wrapped to a negative one reads zeros and is found out, instead
    of ending the process.
    """
    dtype = DTYPES[case.dtype]
    shape = (num_blocks, case.block_size, case.kv_heads, case.head_size)
    strides = (stride, case.kv_heads * case.head_size, case.head_size, 1)
    tensors = []
    for _ in range(2):
        elements = FAR + num_blocks * stride
        if device.type == "cpu":
            tensors.append(_untouched(elements, dtype).as_strided(shape, strides, FAR))
        else:
            try:
                tensors.append(torch.empty(elements - FAR, dtype=dtype, device=device).as_strided(shape, strides))
            except torch.OutOfMemoryError:
                pytest.skip("needs a pool of more than 2**31 elements, and the device has no room for it")
    return LayerKV(0, case.layer, tensors[0], tensors[1], case.block_size)


def _untouched(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory page by page, when touched."""
    if sys.platform != "linux":
        pytest.skip("only Linux is known to reserve address space without memory")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)
