"""The look at an attention before it is timed."""

from __future__ import annotations

import pytest
import torch

from nanofw.attention import AttentionSpec
from nanofw.kv_cache import LayerSpec
from nanofw.testing.cases import Case, numbers
from nanofw.testing.right import assert_right, check_case, ends
from nanofw_gather.vectorized import VectorizedGather

CPU = torch.device("cpu")
LAYERS = (LayerSpec(4, 2, 32, 32**-0.5), LayerSpec(4, 2, 32, 0.2, window=16, soft_cap=4.0))


def spec(block_size=16):
    return AttentionSpec(LAYERS, torch.float32, CPU, block_size)


class Scaled(VectorizedGather):
    def attend(self, q, kv, batch):
        return super().attend(q * 1.02, kv, batch)


class Unbounded(VectorizedGather):
    def attend(self, q, kv, batch):
        if kv.spec.window is not None:
            q = q * 0
        return super().attend(q, kv, batch)


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_right_one_passes(block_size):
    assert_right(VectorizedGather, spec(block_size))


@pytest.mark.parametrize("wrong", [Scaled, Unbounded])
def test_a_wrong_one_is_told_with_where_it_is_off(wrong):
    with pytest.raises(AssertionError, match="off by"):
        assert_right(wrong, spec())


def test_the_ends_of_a_large_case_are_requests_of_it():
    case = Case(contexts=(20, 30, 40), queries=(5, 1, 1), head_size=32, heads=4)
    dense = numbers(case, CPU)
    part, few = ends(case, dense)
    assert (part.contexts, part.queries) == ((20, 40), (5, 1))
    assert few.q[1] is dense.q[2]
    one = Case(contexts=(20,), head_size=32, heads=4)
    assert ends(one, numbers(one, CPU))[0] == one
    check_case(VectorizedGather, part, CPU)
