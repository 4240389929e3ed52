"""Any decoder-only model of transformers, unmodified: only its attention is ours, through `AttentionInterface`.

All requests of a step are packed in one row `[1, T]`. The step travels as a keyword argument from the model's forward
down to each layer's attention, so two models, or two engines with one model, never meet.

When a model is made it runs once with a probe in place of the attention: see `transformers_probe`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from nanofw.attention import Attention
from nanofw.batch import Batch
from nanofw.errors import PluginError
from nanofw.kv_cache import LayerKV
from nanofw.model import Model, ModelSpec
from nanofw.weights import ModelSource
from nanofw_basics.one_by_one import one_by_one
from nanofw_basics.transformers_probe import PROBE, probe, unsupported

NAME = "nanofw"
NAME_COMPILED = "nanofw-compiled"


class StepContext:
    """One step, as it reaches the attention function. No dataclass: torch.compile would look into its fields."""

    def __init__(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> None:
        self.batch, self.attention, self.kv = batch, attention, kv


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    nanofw_step: StepContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: hand q, k and v `[1, H, T, D]` to the attention plugin, give back `[1, T, Hq, D]`."""
    layer = nanofw_step.kv[module.layer_idx]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return nanofw_step.attention.forward(q, k, v, layer, nanofw_step.batch)[None], None


class TransformersModel(Model):
    """A decoder of transformers.

    Args:
        source: the weights. dtype: of weights and activations. device: where they are. options: whether to compile it.

    Raises:
        PluginError: the model needs something that nanofw's attention does not do; all such things are named.
    """

    @dataclass(frozen=True, slots=True)
    class Options:
        """How the layers run.

        Attributes:
            compile: backend of torch.compile ("inductor"), which fuses what lies between the projections and the
                attention; empty: as transformers wrote them. Compiled once for one token a step and once for more, by
                the first steps.
            batch_invariant: run the requests of a step one after another, so that each gets the same bits alone and in
                any company. Slow: a step takes as long as all of them alone.
        """

        compile: str = ""
        batch_invariant: bool = False

        def __post_init__(self) -> None:
            if self.compile and self.compile not in (known := torch.compiler.list_backends(exclude_tags=())):
                raise ValueError(
                    f"compile must be a backend of torch.compile ({', '.join(known)}), got {self.compile!r}"
                )

    options: Options

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device, options: Options) -> None:
        reasons = unsupported(source.config)
        if reasons:
            raise _refusal(source, reasons)
        self.options = options
        self.batch_invariant_on = (device.type,) if options.batch_invariant else ()
        self.module = cast("Any", source.load_module(dtype, device, PROBE))
        max_len = int(source.config.max_position_embeddings)
        layers, reasons = probe(self.module, source.config, max_len, dtype, device)
        if reasons:
            raise _refusal(source, reasons)
        _use_attention(self.module, NAME_COMPILED if options.compile else NAME)
        if options.compile:
            _compile_layers(self.module, options.compile)
        ways = {
            f"layers compiled by {options.compile}": options.compile,
            "requests one by one": options.batch_invariant,
        }
        self.path = ", ".join(way for way, taken in ways.items() if taken)
        self.spec = ModelSpec(
            layers=layers,
            vocab_size=self.module.get_output_embeddings().weight.shape[0],
            max_len=max_len,
            dtype=dtype,
            device=device,
            weight_bytes=weight_bytes(self.module),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        """Logits `[B, V]` of the model's dtype; see the contract."""
        run = functools.partial(self._run, attention=attention, kv=kv)
        return one_by_one(run, batch, attention, kv[0].block_size) if self.options.batch_invariant else run(batch)

    def _run(self, batch: Batch, attention: Attention, kv: Sequence[LayerKV]) -> torch.Tensor:
        output = self.module(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_indices,
            nanofw_step=StepContext(batch, attention, kv),
        )
        logits: torch.Tensor = output.logits
        return logits[0]


def weight_bytes(module: Any) -> int:
    """Bytes of the weights that a decode step reads; all experts of a mixture count.

    An embedding is not among them, since only single rows of it are read, unless it is the output head as well.
    """
    head = module.get_output_embeddings().weight
    tables = {m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding) and m.weight is not head}
    return sum(p.numel() * p.element_size() for p in module.parameters() if p not in tables)


def _use_attention(module: Any, name: str) -> None:
    """Switch the model's own configs (it never shares them) to another attention."""
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    for config in configs.values():
        config._attn_implementation = name


def _compile_layers(module: Any, backend: str) -> None:
    """Compile the decoder's layers, not what stands around them: one layer's code serves all."""
    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer):  # what transformers makes its layers of
            part.compile(backend=backend, dynamic=True)


def _refusal(source: ModelSource, reasons: list[str]) -> PluginError:
    kind = getattr(source.config, "model_type", "?")
    return PluginError(f"model 'transformers' cannot serve {source.name} ({kind}): {'; '.join(reasons)}")


# Stateless, and all that this module leaves in transformers. No mask is registered for it, so none is built.
AttentionInterface.register(NAME, attend)
# The attention stays outside what is compiled, whatever it is made of, and gets its step as an object.
AttentionInterface.register(NAME_COMPILED, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
