"""What a model of transformers asks of its attention, found out by running it once on a few tokens.

A probe takes the attention's place. What each layer passes to it makes the `ModelSpec`; whatever nanofw's attention
could not honour becomes a reason to refuse the model, before it can generate anything wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from nanofw.kv_cache import LayerSpec

PROBE = "nanofw-probe"
PROBE_TOKENS = 5

# What models pass to an attention beside q, k and v that changes nothing here: positions are in k already, the rest
# asks for outputs that nobody reads, or for flash kernels' packing, which the batch describes.
_HARMLESS = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
_HARMLESS |= {"position_embeddings", "past_key_values", "output_router_logits", "logits_to_keep", "deterministic"}
_UNDERSTOOD = {"nanofw_step", "scaling", "sliding_window", "softcap", "dropout", "is_causal"}
_FIXED_ATTENTION = "its class {} does not take another attention (_supports_attention_backend)"
_WORDS = {
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks (sinks)",
    "position_bias": "a bias by position (position_bias)",
    "alibi": "a bias by position (alibi)",
    "head_mask": "a mask of heads (head_mask)",
}


def unsupported(config: Any) -> list[str]:
    """What a config asks for that cannot be served, found before any weight is loaded."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    reasons = []
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # none for code that a checkpoint brings
    if cls is not None and not cls._supports_attention_backend:
        reasons.append(_FIXED_ATTENTION.format(cls.__name__))
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it has an encoder")
    kinds = getattr(config, "layer_types", None) or []
    for kind in sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        reasons.append(f"layer type {kind} (layers {_numbers([i for i, k in enumerate(kinds) if k == kind])})")
    if shared := getattr(config, "num_kv_shared_layers", 0):
        reasons.append(f"{shared} layers that share the keys and values of others")
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [table for table in rope.values() if isinstance(table, dict)] if "rope_type" not in rope else [rope]
    for kind in sorted({str(table.get("rope_type")) for table in tables} & {"dynamic", "longrope"}):
        reasons.append(f"rotary embedding {kind}, whose frequencies depend on the longest request of a batch")
    if getattr(config, "max_position_embeddings", None) is None:
        reasons.append("its config does not say how many positions it was made for (max_position_embeddings)")
    return reasons


@dataclass(slots=True)
class Probe:
    """What the layers passed to their attention in one forward: a `LayerSpec` for each call, and reasons to refuse."""

    max_len: int
    dtype: torch.dtype
    layers: list[LayerSpec] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    reasons: dict[str, list[int]] = field(default_factory=dict)
    keys: list[torch.Tensor] = field(default_factory=list)

    def refuse(self, reason: str, layer: int) -> None:
        """Note a reason, once with all its layers."""
        self.reasons.setdefault(reason, []).append(layer)


@dataclass(frozen=True, slots=True)
class ProbeMask:
    """Stands for a mask: what the model wants masked, as a function of (batch, head, query, key) indices."""

    function: Callable[..., Any]
    device: torch.device


def probe(
    module: Any, config: Any, max_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[LayerSpec, ...], list[str]]:
    """Run `module`, loaded with the probe attention, once.

    Returns:
        The geometry of each layer, and every reason why the model cannot be served.
    """
    if not getattr(module, "_supports_attention_backend", False):
        return (), [_FIXED_ATTENTION.format(type(module).__name__)]
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        return (), [f"its class {type(module).__name__} computes logits of all tokens (it takes no logits_to_keep)"]
    seen = Probe(max_len, dtype)
    tokens = torch.arange(PROBE_TOKENS, device=device)[None]
    with torch.inference_mode():
        try:
            module(input_ids=tokens, position_ids=tokens, use_cache=False, nanofw_step=seen)
        except Exception as error:  # the model's own code meets stand-ins here, and may fail in any way
            lines = str(error).splitlines()
            return (), [*_told(seen), f"its forward failed: {lines[0] if lines else type(error).__name__}"]
    reasons = _told(seen)
    count = int(config.num_hidden_layers)
    if not reasons and seen.numbers != list(range(count)):
        silent = sorted(set(range(count)) - set(seen.numbers))
        what = f"layers {_numbers(silent)} do not" if silent else "layers that more than once or out of order"
        reasons.append(f"{what} call the attention (it has {count} layers and made {len(seen.numbers)} calls)")
    return tuple(seen.layers), reasons


def record(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The probe in place of an attention: note what a layer passes; the output is zero."""
    seen = kwargs.get("nanofw_step")
    if not isinstance(seen, Probe):
        raise RuntimeError("it does not hand keyword arguments of its forward down to the attention")
    number = int(getattr(module, "layer_idx", len(seen.numbers)))
    seen.numbers.append(number)
    for name, given in kwargs.items():
        if given is not None and name not in _UNDERSTOOD | _HARMLESS:
            seen.refuse(_WORDS.get(name, f"the attention argument {name}"), number)
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        seen.refuse("attention that is not causal", number)
    if kwargs.get("dropout"):
        seen.refuse("dropout", number)
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        sizes = f"query {query.shape[-1]}, key {key.shape[-1]}, value {value.shape[-1]}"
        seen.refuse(f"heads of different sizes ({sizes})", number)
    if query.shape[2] != key.shape[2]:
        seen.refuse("keys that are not those of its own tokens", number)
    if any(key.data_ptr() == other.data_ptr() for other in seen.keys):
        seen.refuse("keys and values shared with another layer", number)
    if {query.dtype, key.dtype, value.dtype} != {seen.dtype}:
        kinds = ", ".join(str(t.dtype).removeprefix("torch.") for t in (query, key, value))
        seen.refuse(f"attention in another dtype than the model's (query, key, value: {kinds})", number)
    seen.keys.append(key)  # kept alive, or a later layer may get the same memory
    seen.layers.append(_layer_spec(seen, number, query, key, attention_mask, kwargs))
    return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1])), None


def record_mask(*args: Any, mask_function: Callable[..., Any], device: Any = "cpu", **kwargs: Any) -> ProbeMask:
    """The probe in place of a mask: it reaches the layers as their `attention_mask`."""
    return ProbeMask(mask_function, torch.device(device))


def _layer_spec(
    seen: Probe, number: int, query: torch.Tensor, key: torch.Tensor, mask: Any, kwargs: dict[str, Any]
) -> LayerSpec:
    scale, cap = kwargs.get("scaling"), kwargs.get("softcap")
    if scale is None:
        scale = query.shape[-1] ** -0.5  # what every attention of transformers takes then
    if not isinstance(scale, (int, float)):
        seen.refuse("a scale that is not one number", number)
        scale = 1.0
    window = kwargs.get("sliding_window")
    try:
        masked = mask_window(mask, seen.max_len, window)
    except ValueError as error:
        seen.refuse(str(error), number)
        masked = None
    else:
        narrow = window if window is not None and window < seen.max_len else None
        if "sliding_window" in kwargs and narrow != masked:
            seen.refuse(f"a window of {narrow or 'all'} keys where its mask shows {masked or 'all'}", number)
    return LayerSpec(query.shape[1], key.shape[1], query.shape[-1], float(scale), masked, float(cap) if cap else None)


def mask_window(mask: Any, max_len: int, hint: int | None = None) -> int | None:
    """The window of a causal mask, checked up to position `max_len - 1`.

    Rows of the mask are looked at as a whole: around the window's edge, and at each power of two, where masks that
    work in chunks show themselves.

    Args:
        mask: what a layer got as its mask.
        max_len: positions.
        hint: the window that the layer names, if it does.

    Returns:
        Keys that a query sees, itself included; None if it sees all before it.

    Raises:
        ValueError: the mask is not causal, or not a window, or cannot be looked into.
    """
    if not isinstance(mask, ProbeMask):
        raise ValueError("a mask of its own making, which cannot be checked")
    last = max_len - 1
    shown = _visible(mask, last, max_len)
    window = None if len(shown) == max_len else len(shown)
    edges = {edge for edge in (window, hint) if edge is not None}
    rows = {2**power + step for power in range(last.bit_length() + 1) for step in (-1, 0, 1)}
    rows |= {times * edge + step for edge in edges for times in (1, 2, 3) for step in (-2, -1, 0, 1)} | {last}
    for query in sorted(row for row in rows if 0 <= row <= last):
        first = 0 if window is None else max(0, query - window + 1)
        shown = _visible(mask, query, max_len)
        if len(shown) != query + 1 - first or int(shown[0]) != first or int(shown[-1]) != query:
            keys = f"{len(shown)} keys from {int(shown[0])} to {int(shown[-1])}" if len(shown) else "no key"
            raise ValueError(f"a mask that is not causal with one window (the token at {query} sees {keys})")
    return window


def _visible(mask: ProbeMask, query: int, max_len: int) -> torch.Tensor:
    """Keys that the mask shows to `query`: a margin past it, and the last position, are looked at too."""
    zero = torch.zeros((), dtype=torch.int64, device=mask.device)
    keys = torch.arange(min(query + 16, max_len), device=mask.device)
    if len(keys) < max_len:
        keys = torch.cat((keys, keys.new_tensor([max_len - 1])))
    try:
        shown = mask.function(zero, zero, torch.full_like(keys, query), keys)
        return keys[torch.as_tensor(shown, device=mask.device).expand_as(keys)]
    except (IndexError, RuntimeError, TypeError) as error:
        raise ValueError("a mask that depends on more than positions") from error


def _told(seen: Probe) -> list[str]:
    every = len(seen.numbers)
    return [
        reason if len(layers) == every else f"{reason} (layers {_numbers(layers)})"
        for reason, layers in seen.reasons.items()
    ]


def _numbers(layers: list[int]) -> str:
    return ", ".join(map(str, layers[:6])) + (", ..." if len(layers) > 6 else "")


# Stateless, and all that this module leaves in transformers.
AttentionInterface.register(PROBE, record)
AttentionMaskInterface.register(PROBE, record_mask)
