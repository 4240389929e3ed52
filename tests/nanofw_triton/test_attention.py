"""Paged attention in Triton passes the conformance suite: in the interpreter, or on the GPU where there is one."""

import pytest
import torch

pytest.importorskip("triton")

from nanofw.testing import AttentionSuite
from nanofw_triton.attention import TritonPagedAttention


class TestTritonPaged(AttentionSuite):
    backend = TritonPagedAttention
    device = "cuda" if torch.cuda.is_available() else "cpu"


class TestTritonPagedInSplits(AttentionSuite):
    """Contexts cut into more parts than they have tiles, merged again."""

    backend = TritonPagedAttention
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"splits": 8}
    max_examples = 10
