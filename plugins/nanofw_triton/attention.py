"""`triton-paged`: attention that reads the cache where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from nanofw.attention import Attention, AttentionSpec, Capabilities, Prologue
from nanofw.batch import Batch
from nanofw.kv_cache import LayerKV
from nanofw.launch import interpreted, launch, no_triton
from nanofw.laws import FLAT, CountLaw
from nanofw.pdl import available, launch_options
from nanofw_triton.kernels.decode import decode_kernel, merge_kernel
from nanofw_triton.kernels.packed import packed_decode_kernel, prologue_kernel
from nanofw_triton.kernels.prefill import prefill_kernel
from nanofw_triton.kernels.write import write_kernel
from nanofw_triton.plan import MAX_SPLITS, Plan, make_plan


class TritonPagedAttention(Attention):
    """Split-KV decode and fused prefill. Any ratio of heads, head size up to 512, window, soft cap, block size."""

    @dataclass(frozen=True, slots=True)
    class Options:
        """splits: parts a decode context is cut into, a power of two; 0 chooses by batch and context bound."""

        splits: int = 0

        def __post_init__(self) -> None:
            if not 0 <= self.splits <= MAX_SPLITS or self.splits & (self.splits - 1):
                raise ValueError(f"splits must be 0 or a power of two up to {MAX_SPLITS}, got {self.splits}")

    options: Options
    capabilities = Capabilities(
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
        devices=("cuda", "cpu"),
        head_sizes=range(1, 513),
        windows=True,
        soft_cap=True,
        graphs=True,
        reads_padding=False,
    )
    laws = (*FLAT, CountLaw("bytes_written"))  # by torch: nothing of the context is copied

    @classmethod
    def unavailable(cls) -> str | None:
        """Needs Triton."""
        return no_triton()

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        """Beyond the declared: on a CPU only Triton's interpreter runs, and it computes bfloat16 wrongly."""
        reasons = super().validate(spec)
        if spec.device.type == "cpu":
            if not interpreted():
                reasons.append("way to run on a CPU but Triton's interpreter (set TRITON_INTERPRET=1 before starting)")
            elif spec.dtype == torch.bfloat16:
                reasons.append("right results in bfloat16 in Triton's interpreter (tl.dot is off by 1e10; use float32)")
        return reasons

    def __init__(self, spec: AttentionSpec, options: Options) -> None:
        super().__init__(spec, options)
        cuda = spec.device.type == "cuda"
        self._multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count if cuda else 4
        self._precision = "ieee" if spec.dtype == torch.float32 else "tf32"  # tf32 would round fp32 inputs
        self._pdl = available(spec.device)

    def plan(self, batch: Batch) -> Plan:
        """See `nanofw_triton.plan`."""
        return make_plan(self.spec, batch, self.options.splits, self._multiprocessors)

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """At most three launches; see the contract."""
        plan: Plan = batch.plan
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.decoding:
            self._decode(q, kv, batch, plan, out)
        if plan.tiles is not None:
            self._prefill(q, kv, batch, plan, out)
        return out

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, batch: Batch) -> None:
        """One launch for both."""
        spec = kv.spec
        launch(
            write_kernel,
            (k.shape[0],),
            k,
            v,
            kv.key,
            kv.value,
            batch.slot_mapping,
            *k.stride()[:2],
            *v.stride()[:2],
            *kv.key.stride()[:3],
            BLOCK_SIZE=kv.block_size,
            KV_HEADS=spec.num_kv_heads,
            KV_HEADS_PAD=triton.next_power_of_2(spec.num_kv_heads),
            SIZE=spec.head_size,
            SIZE_PAD=triton.next_power_of_2(spec.head_size),
        )

    def forward_packed(self, qkv: torch.Tensor, prologue: Prologue, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """A step that only decodes takes one launch; any other prepares q and the cache, then attends."""
        plan: Plan = batch.plan
        if plan.tiles is None:
            return self._decode_packed(qkv, prologue, kv, batch, plan)
        spec = kv.spec
        q = torch.empty((qkv.shape[0], spec.num_heads, spec.head_size), dtype=qkv.dtype, device=qkv.device)
        rows = 16 if spec.head_size <= 256 else 4
        launch(
            prologue_kernel,
            (qkv.shape[0], triton.cdiv(spec.num_heads + 2 * spec.num_kv_heads, rows)),
            qkv,
            q,
            kv.key,
            kv.value,
            *_tensors(prologue),
            batch.positions,
            batch.slot_mapping,
            prologue.eps,
            *kv.key.stride()[:3],
            NORM=prologue.q_norm is not None,
            BLOCK_SIZE=kv.block_size,
            HEADS=spec.num_heads,
            KV_HEADS=spec.num_kv_heads,
            ROWS=rows,
            SIZE=spec.head_size,
            SIZE_PAD=triton.next_power_of_2(spec.head_size),
            **launch_options(self._pdl),
        )
        return self.attend(q, kv, batch).flatten(1)

    def _decode_packed(
        self, qkv: torch.Tensor, prologue: Prologue, kv: LayerKV, batch: Batch, plan: Plan
    ) -> torch.Tensor:
        spec, shape, constants = kv.spec, plan.shape, self._constants(kv)
        out = torch.empty((qkv.shape[0], spec.num_heads * spec.head_size), dtype=qkv.dtype, device=qkv.device)
        work = plan.workspace
        launch(
            packed_decode_kernel,
            (spec.num_kv_heads, shape.splits, plan.decoding),
            qkv,
            kv.key,
            kv.value,
            out,
            *((out, out, out) if work is None else (work.partial, work.lse, work.arrived)),
            *_tensors(prologue),
            batch.seq_lens,
            batch.slot_mapping,
            batch.block_table,
            batch.seq_lens if plan.requests is None else plan.requests,
            spec.scale,
            prologue.eps,
            *kv.key.stride()[:3],
            batch.block_table.stride(0),
            qkv.shape[0],
            ALL=plan.requests is None,
            NORM=prologue.q_norm is not None,
            ROWS=max(triton.next_power_of_2(constants["GROUP"] + 1), 16),
            TILE=shape.tile,
            STAGES=shape.stages,
            SPLITS=shape.splits,
            num_warps=shape.warps,
            **constants,
            **launch_options(self._pdl),
        )
        return out

    def _decode(self, q: torch.Tensor, kv: LayerKV, batch: Batch, plan: Plan, out: torch.Tensor) -> None:
        spec, shape, splits = kv.spec, plan.shape, plan.shape.splits
        tokens, heads, size = q.shape
        partial, lse = (out, out) if plan.workspace is None else (plan.workspace.partial, plan.workspace.lse)
        requests = batch.seq_lens if plan.requests is None else plan.requests
        launch(
            decode_kernel,
            (spec.num_kv_heads, splits, plan.decoding),
            q,
            kv.key,
            kv.value,
            partial,
            lse,
            requests,
            *self._shared(q, kv, batch),
            tokens,
            ALL=plan.requests is None,
            GROUP_PAD=max(triton.next_power_of_2(heads // spec.num_kv_heads), 16),
            TILE=shape.tile,
            STAGES=shape.stages,
            SPLITS=splits,
            num_warps=shape.warps,
            **self._constants(kv),
        )
        if splits > 1:
            launch(
                merge_kernel,
                (plan.decoding, heads),
                partial,
                lse,
                out,
                requests,
                batch.cu_seqlens_q,
                tokens,
                ALL=plan.requests is None,
                HEADS=heads,
                SIZE=size,
                SIZE_PAD=triton.next_power_of_2(size),
                SPLITS=splits,
                SPLITS_PAD=triton.next_power_of_2(splits),
            )

    def _prefill(self, q: torch.Tensor, kv: LayerKV, batch: Batch, plan: Plan, out: torch.Tensor) -> None:
        assert plan.tiles is not None
        spec = kv.spec
        rows = max(triton.next_power_of_2(plan.queries * spec.num_heads // spec.num_kv_heads), 16)
        launch(
            prefill_kernel,
            (plan.tiles.shape[0], spec.num_kv_heads),
            q,
            kv.key,
            kv.value,
            out,
            plan.tiles,
            *self._shared(q, kv, batch),
            QUERIES=plan.queries,
            ROWS=rows,
            TILE=64 if spec.head_size <= 128 else 32,
            num_warps=8 if rows >= 128 else 4,
            **self._constants(kv),
        )

    def _shared(self, q: torch.Tensor, kv: LayerKV, batch: Batch) -> tuple[Any, ...]:
        """Arguments that decode and prefill take alike, in their order."""
        return (
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.block_table,
            kv.spec.scale,
            *q.stride()[:2],
            *kv.key.stride()[:3],
            batch.block_table.stride(0),
        )

    def _constants(self, kv: LayerKV) -> dict[str, Any]:
        spec = kv.spec
        return {
            "BLOCK_SIZE": kv.block_size,
            "HEADS": spec.num_heads,
            "GROUP": spec.num_heads // spec.num_kv_heads,
            "SIZE": spec.head_size,
            "SIZE_PAD": max(triton.next_power_of_2(spec.head_size), 16),
            "WINDOW": spec.window or 0,
            "SOFT_CAP": spec.soft_cap or 0.0,
            "PRECISION": self._precision,
        }


def _tensors(prologue: Prologue) -> tuple[torch.Tensor, ...]:
    """Its tensors in the order of the kernels; without norms, any tensor stands in for their weights."""
    q_norm = prologue.cos if prologue.q_norm is None else prologue.q_norm
    return prologue.cos, prologue.sin, q_norm, prologue.cos if prologue.k_norm is None else prologue.k_norm
