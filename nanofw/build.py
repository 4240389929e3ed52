"""From settings to an engine: resolve each kind's plugin, check that they can work together, and put them together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from nanofw import capacity
from nanofw.attention import Attention, AttentionSpec
from nanofw.batch import Batch, pack
from nanofw.component import KINDS
from nanofw.config import Config
from nanofw.engine import Engine, Resolved
from nanofw.errors import CapacityError, ConfigError, PluginError
from nanofw.kv_cache import KVCache, KVCacheSpec
from nanofw.model import Model
from nanofw.options import build_options
from nanofw.plugins import PluginHost
from nanofw.progress import doing
from nanofw.request import Request, SamplingParams
from nanofw.runner import Parts, Runner
from nanofw.sampler import Sampler
from nanofw.scheduler import Limits, Scheduler
from nanofw.table import RequestTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanofw.component import Component, Kind
    from nanofw.plugins import Registration
    from nanofw.weights import ModelSource

OBSERVER_HOOKS = ("nanofw_engine_created", "nanofw_step_finished", "nanofw_request_finished")


def build_model(config: Config, host: PluginHost, source: ModelSource) -> Model:
    """Load a model with the plugin that `config.model_impl` names. Raises PluginError, CheckpointError."""
    device = resolve_device(config.device)
    chosen = host.get("model", config.model_impl)
    cls = cast("type[Model]", chosen.load())
    doing(f"loading {source.name}")
    return cls(source, resolve_dtype(config.dtype, device, source), device, _options(config, chosen, cls))


def build_engine(
    config: Config,
    host: PluginHost,
    source: ModelSource,
    model: Model | None = None,
    wrap_attention: Callable[[Attention], Attention] | None = None,
) -> Engine:
    """Put an engine together.

    Args:
        config: the settings.
        host: loaded plugins.
        source: the model, for its tokenizer and end ids.
        model: a loaded model to share with other engines; None loads one.
        wrap_attention: puts an observer around the attention (`nanofw diff` records its outputs).

    Raises:
        PluginError: a plugin is missing, or cannot serve the others; all reasons are listed.
        ConfigError, CapacityError, CheckpointError: see there.
    """
    model = model or build_model(config, host, source)
    kinds: tuple[Kind, ...] = ("attention", "kv_cache", "scheduler", "runner", "sampler")
    chosen = {kind: host.get(kind, getattr(config, kind)) for kind in kinds}
    classes: dict[str, type[Component]] = {kind: registration.load() for kind, registration in chosen.items()}
    options = {kind: _options(config, chosen[kind], classes[kind]) for kind in kinds}

    cache_cls, attention_cls = cast("type[KVCache]", classes["kv_cache"]), cast("type[Attention]", classes["attention"])
    cache_spec = KVCacheSpec(
        layers=model.spec.layers,
        num_blocks=0,
        rows=config.max_num_seqs,
        max_len=config.max_model_len or model.spec.max_len,
        dtype=model.spec.dtype,
        device=model.spec.device,
    )
    attention_spec = AttentionSpec(
        layers=model.spec.layers,
        dtype=model.spec.dtype,
        device=model.spec.device,
        block_size=cache_cls.block_slots(cache_spec, options["kv_cache"]),
        layout=cache_cls.layout,
    )
    _refuse(
        chosen["attention"], attention_cls.validate(attention_spec), f"model {config.model!r} on {model.spec.device}"
    )
    if config.max_model_len is not None and config.max_model_len > model.spec.max_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {model.spec.max_len} positions of {config.model}"
        )
    attention = attention_cls(attention_spec, options["attention"])
    if wrap_attention is not None:
        attention = wrap_attention(attention)
    sampler = cast("type[Sampler]", classes["sampler"])(options["sampler"])

    doing("choosing the size of the KV cache")
    size = capacity.choose(
        config,
        cache_cls,
        cache_spec,
        options["kv_cache"],
        model.spec.max_len,
        lambda: _peak_bytes(config, model, attention, sampler, cache_cls, cache_spec, options["kv_cache"]),
    )
    try:
        kv_cache = cache_cls(
            replace(cache_spec, num_blocks=size.num_blocks, max_len=size.max_model_len), options["kv_cache"]
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CapacityError(
            f"a KV cache of {size.num_blocks:,} blocks does not fit into memory: lower kv_memory or kv_blocks"
        ) from error
    table = RequestTable(config.max_num_seqs, size.max_model_len)
    limits = Limits(config.max_num_seqs, config.max_batch_tokens)
    scheduler = cast("type[Scheduler]", classes["scheduler"])(limits, table, kv_cache, options["scheduler"])
    parts = Parts(model, attention, kv_cache, sampler, model.spec.device, config.max_num_seqs, config.max_batch_tokens)
    runner_cls = cast("type[Runner]", classes["runner"])
    _refuse(chosen["runner"], runner_cls.validate(parts), "these plugins together")
    runner = runner_cls(parts, options["runner"])
    doing(f"warming up {chosen['runner'].name}")
    runner.warm_up()
    built: dict[Kind, Component] = {
        "model": model,
        "attention": attention,
        "kv_cache": kv_cache,
        "scheduler": scheduler,
        "runner": runner,
        "sampler": sampler,
    }
    chosen["model"] = host.get("model", config.model_impl)
    return Engine(
        scheduler=scheduler,
        kv_cache=kv_cache,
        runner=runner,
        table=table,
        max_model_len=size.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=source.eos_token_ids,
        tokenizer=source.load_tokenizer(),
        depth=config.steps_in_flight,
        seed=config.seed,
        plugins={kind: _resolved(chosen[kind], built[kind], model.spec.device) for kind in KINDS},
        notes=list(size.notes),
        observers={hook: host.observers(hook) for hook in OBSERVER_HOOKS},
    )


def resolve_device(name: str) -> torch.device:
    """The device that a setting names; "auto" is a GPU where there is one. Raises ConfigError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used here: {reason}; use 'cpu' or 'auto'") from error
    return device


def resolve_dtype(name: str, device: torch.device, source: ModelSource) -> torch.dtype:
    """The dtype that a setting names; "auto" is float32 on a CPU, where half precision is slow."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else source.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _options(config: Config, registration: Registration, cls: type[Component]) -> Any:
    given = config.options.get(registration.kind, {})
    return build_options(cls.Options, given, f"{registration.kind} {registration.name!r}")


def _refuse(registration: Registration, reasons: list[str], what: str) -> None:
    if reasons:
        raise PluginError(f"{registration.label} cannot serve {what}: it has no {'; no '.join(reasons)}")


def _resolved(registration: Registration, part: Any, device: torch.device) -> Resolved:
    source = registration.source
    invariant = None
    if isinstance(part, Attention):
        invariant = part.capabilities.batch_invariant
    elif isinstance(part, Model | Sampler):
        invariant = device.type in part.batch_invariant_on
    return Resolved(registration.name, source.distribution, source.version, part.path, invariant)


@torch.inference_mode()
def _peak_bytes(
    config: Config,
    model: Model,
    attention: Attention,
    sampler: Sampler,
    cache_cls: type[KVCache],
    spec: KVCacheSpec,
    options: Any,
) -> int:
    """Memory that the largest step takes beyond weights and cache, measured on a cache just large enough for it.

    The step is one prompt of `max_batch_tokens`, then a full batch of logits to sample from.
    """
    tokens = min(config.max_batch_tokens, spec.max_len - 1)
    blocks = -(-tokens // cache_cls.block_slots(spec, options)) + 1
    cache = cache_cls(replace(spec, num_blocks=blocks, rows=1, max_len=tokens + 1), options)
    table, rows, lengths = RequestTable(1, tokens + 1), np.array([0]), np.array([tokens])
    table.open(Request("profile", (0,) * tokens, SamplingParams(), 0, tokens + 1, "length", ()))
    cache.allocate(rows, lengths)
    before = torch.cuda.memory_allocated(spec.device)
    torch.cuda.reset_peak_memory_stats(spec.device)
    batch = Batch.from_step(pack(table, rows, lengths, cache.block_table, cache.block_size), spec.device)
    model.forward(batch.with_plan(attention.plan(batch)), attention, cache.layers)
    sampler.sample(torch.zeros(config.max_num_seqs, model.spec.vocab_size, device=spec.device), None)
    return torch.cuda.max_memory_allocated(spec.device) - before
