"""What all attention checks share: building the backend or skipping with its reasons, running a step, comparing."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from nanofw.attention import Attention, AttentionSpec, Capabilities
from nanofw.options import build_options
from nanofw.testing import tolerance
from nanofw.testing.cases import Case, Dense, dtype_names, numbers, pick
from nanofw.testing.layout import Layout, Problem, lay_out
from nanofw.testing.suite import Suite

PLAIN = Layout()


class AttentionBase(Suite):
    """Base of the groups of checks.

    Attributes a subclass sets:
        backend: a subclass of `Attention`.
        device: where to test it; by default the environment's `NANOFW_TEST_DEVICE`, else the CPU if the backend
            declares it, else the first device that it does.
    """

    backend: ClassVar[type[Attention]]
    device: ClassVar[str | None] = None

    @classmethod
    def can(cls) -> Capabilities:
        """What the backend declares."""
        return cls.backend.capabilities

    @classmethod
    def torch_device(cls) -> torch.device:
        """Where the checks run."""
        declared = cls.can().devices
        default = "cpu" if declared is None or "cpu" in declared else sorted(declared)[0]
        return torch.device(cls.device or os.environ.get("NANOFW_TEST_DEVICE") or default)

    @classmethod
    def case(cls, contexts: tuple[int, ...], queries: tuple[int, ...] | None = None, **changes: Any) -> Case:
        """A case in the backend's own terms: usual sizes where it declares them, else its smallest."""
        can = cls.can()
        usual: dict[str, Any] = {
            "dtype": pick(dtype_names(can), "fp32", "fp16", "bf16"),
            "head_size": pick(can.head_sizes, 64),
            "block_size": pick(can.block_sizes, 16),
            "kv_heads": 2 if can.gqa else 8,
        }
        return Case(contexts, queries, **usual | changes)

    @classmethod
    def block(cls) -> int:
        """Block size of `case()`."""
        return pick(cls.can().block_sizes, 16)  # type: ignore[no-any-return]

    def build(self, spec: AttentionSpec) -> Attention:
        """The backend for `spec`. Skips the test with the backend's reasons if it does not serve that."""
        reasons = [reason for reason in [self.backend.unavailable()] if reason]
        if spec.device.type == "cuda" and not torch.cuda.is_available():
            reasons.append("no GPU")
        reasons += self.backend.validate(spec)
        if reasons:
            pytest.skip(f"{self.backend.__name__} does not serve: {'; '.join(reasons)}")
        options = build_options(self.backend.Options, self.options, self.backend.__name__)
        return self.backend(spec, options)

    def numbers(self, case: Case) -> Dense:
        """The case's numbers, on the device."""
        return numbers(case, self.torch_device())

    def attend(self, case: Case, dense: Dense | None = None, layout: Layout = PLAIN) -> torch.Tensor:
        """Output of the real requests `[t, Hq, D]`, each in a cache of its own."""
        attention = self.build(case.spec(self.torch_device()))
        problem = lay_out(case, dense or self.numbers(case), layout)
        return run(attention, problem)[: problem.live_tokens]

    def check(self, case: Case, dense: Dense | None = None, layout: Layout = PLAIN) -> None:
        """Attend, and compare each request with the reference."""
        attention = self.build(case.spec(self.torch_device()))
        dense = dense or self.numbers(case)
        problem = lay_out(case, dense, layout)
        compare(problem, dense, run(attention, problem))

    def check_same(self, case: Case, one: Layout, other: Layout, what: str, dense: Dense | None = None) -> None:
        """Two layouts of the same numbers give the same bits."""
        dense = dense or self.numbers(case)
        tolerance.check_same_bits(self.attend(case, dense, one), self.attend(case, dense, other), what)


def run(attention: Attention, problem: Problem) -> torch.Tensor:
    """One step of one layer, as a runner and a model would do it. Padding rows included. Checks shape and dtype."""
    with torch.inference_mode():
        batch = problem.batch.with_plan(attention.plan(problem.batch))
        out = attention.forward(problem.q, problem.k, problem.v, problem.kv, batch)
    got, expected = (out.shape, out.dtype, out.device), (problem.q.shape, problem.q.dtype, problem.q.device)
    if got != expected:
        raise AssertionError(f"output is {describe(*got)}, must be {describe(*expected)}")
    return out


def compare(problem: Problem, dense: Dense, out: torch.Tensor) -> None:
    """Each request's rows against the reference, and zero for padding."""
    case = problem.case
    for index, (got, q, k, v) in enumerate(zip(problem.split(out), dense.q, dense.k, dense.v, strict=True)):
        what = f"{case}: request {index} ({len(q)} queries, context {len(k)})"
        tolerance.check(got, q, k, v, case.layer, what)
    padding = out[problem.live_tokens :]
    if not torch.equal(padding, torch.zeros_like(padding)):
        raise AssertionError(f"{case}: rows of padding requests are not zero")


def one_at_a_time(case: Case, request: int) -> Case:
    """The case of one request alone."""
    queries = None if case.queries is None else (case.queries[request],)
    return replace(case, contexts=(case.contexts[request],), queries=queries, padding=0)


def describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """A tensor in words."""
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
