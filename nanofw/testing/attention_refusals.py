"""What an attention refuses: everything it does not declare, with a reason, before it is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from nanofw.attention import AttentionSpec
from nanofw.testing.attention_base import AttentionBase
from nanofw.testing.cases import DTYPES, dtype_names, spread
from nanofw.testing.suite import cases


@dataclass(frozen=True, slots=True)
class Wish:
    """A spec that may or may not be served. `declared`: whether the capabilities promise it."""

    name: str
    spec: AttentionSpec
    declared: bool

    def __str__(self) -> str:
        return self.name


def wishes(suite: type[AttentionBase]) -> Iterator[Wish]:
    """The base case with one thing changed, declared or not."""
    can, device = suite.can(), suite.torch_device()
    case = suite.case((1,))
    spec = case.spec(device)
    yield Wish("base", spec, True)
    for name, dtype in DTYPES.items():
        yield Wish(name, replace(spec, dtype=dtype), can.dtypes is None or dtype in can.dtypes)
    for size in dict.fromkeys((8, 64, 96, 100, 128, 256, 4096, *spread(can.head_sizes))):
        changed = replace(case, head_size=size).spec(device)
        yield Wish(f"head-size-{size}", changed, can.head_sizes is None or size in can.head_sizes)
    for size in dict.fromkeys((1, 3, 16, 48, 4096, *spread(can.block_sizes))):
        yield Wish(
            f"block-size-{size}", replace(spec, block_size=size), can.block_sizes is None or size in can.block_sizes
        )
    yield Wish("layout", replace(spec, layout="no-such-layout"), "no-such-layout" in can.layouts)
    elsewhere = torch.device("meta")
    yield Wish("device", replace(spec, device=elsewhere), can.devices is None or "meta" in can.devices)
    yield Wish("gqa", replace(case, heads=8, kv_heads=2).spec(device), can.gqa)
    yield Wish("window", replace(case, window=4).spec(device), can.windows)
    yield Wish("soft-cap", replace(case, soft_cap=5.0).spec(device), can.soft_cap)
    last = replace(spec, layers=(*spec.layers, replace(case, window=4).layer))
    yield Wish("window-in-one-layer", last, can.windows)


class Refusals(AttentionBase):
    """`validate` and `capabilities` say the same."""

    @cases(wishes)
    def test_refuses_what_it_does_not_declare(self, case: Wish) -> None:
        """Undeclared: refused with a reason, at construction and never later. Declared: the plain case is served.

        A declared dtype may be refused on one device, if the reason names it. Fails for a backend that accepts an
        argument and ignores it, or raises in the first step. Sources: sglang#1281, sgl-kernel-xpu#491.
        """
        reasons = self.backend.validate(case.spec)
        if not case.declared and not reasons:
            raise AssertionError(f"{case}: not declared, yet validate() gives no reason to refuse it")
        if any(not isinstance(reason, str) or not reason.strip() for reason in reasons):
            raise AssertionError(f"{case}: reasons must be texts for the user, got {reasons!r}")
        if case.declared and reasons and not self._served_in_another_dtype(case):
            raise AssertionError(f"{case}: declared, yet refused: {'; '.join(reasons)}")

    def _served_in_another_dtype(self, case: Wish) -> bool:
        """Whether the refusal is one of a dtype, on this device alone."""
        if str(case) in DTYPES:
            dtype = str(case.spec.dtype).removeprefix("torch.")
            return all(dtype in reason for reason in self.backend.validate(case.spec))
        names = dtype_names(self.can())
        return any(not self.backend.validate(replace(case.spec, dtype=DTYPES[name])) for name in names)
