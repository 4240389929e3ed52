"""Paged attention in Triton passes the conformance suite: all of it on a GPU, a part in the interpreter elsewhere."""

import pytest
import torch

pytest.importorskip("triton")

from nanofw.testing import AttentionSuite
from nanofw_triton.attention import TritonPagedAttention

ON_GPU = torch.cuda.is_available()


class Paged(AttentionSuite):
    device = "cuda" if ON_GPU else "cpu"
    xfail = {} if ON_GPU else {"test_refuses_what_it_does_not_declare[bf16]": "the interpreter computes bf16 wrongly"}


class TestTritonPaged(Paged):
    backend = TritonPagedAttention
    thin = 1 if ON_GPU else 4
    max_examples = 100 if ON_GPU else 8


class TestTritonPagedInSplits(Paged):
    """Contexts cut into more parts than they have tiles, merged again."""

    backend = TritonPagedAttention
    options = {"splits": 8}  # noqa: RUF012
    thin = 1 if ON_GPU else 12
    max_examples = 30 if ON_GPU else 4
