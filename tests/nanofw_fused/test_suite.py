"""The fused model passes the conformance suite: in the interpreter, or on the GPU where there is one."""

from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")

from nanofw.testing import ModelSuite
from nanofw_fused.model import FusedModel


class TestFused(ModelSuite):
    backend = FusedModel
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models: ClassVar = ("qwen3",)
