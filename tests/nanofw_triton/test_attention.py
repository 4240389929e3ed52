"""Paged attention in Triton passes the conformance suite: all of it on a GPU, a part in the interpreter elsewhere."""

import pytest
import torch

pytest.importorskip("triton")

from nanofw.testing import AttentionSuite
from nanofw_triton.attention import TritonPagedAttention

ON_GPU = torch.cuda.is_available()


class TestTritonPaged(AttentionSuite):
    backend = TritonPagedAttention
    device = "cuda" if ON_GPU else "cpu"
    thin = 1 if ON_GPU else 4
    max_examples = 100 if ON_GPU else 8


class TestTritonPagedInSplits(AttentionSuite):
    """Contexts cut into more parts than they have tiles, merged again."""

    backend = TritonPagedAttention
    device = "cuda" if ON_GPU else "cpu"
    options = {"splits": 8}  # noqa: RUF012
    thin = 1 if ON_GPU else 16
    max_examples = 30 if ON_GPU else 4
    test_count_laws = None  # counted once, above
