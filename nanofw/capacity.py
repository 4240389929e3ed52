"""How large the KV cache is: as asked, or a share of the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanofw.config import Config, parse_bytes
from nanofw.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanofw.kv_cache import KVCache, KVCacheSpec

CPU_SHARE = 0.25
"""Of a CPU machine's available memory: its other programs need the rest."""

GPU_SHARE = 0.9
"""Of a GPU's memory, less what is in use and what a step needs at its largest."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of the pool, and the longest request it allows.

    Attributes:
        num_blocks: the null block included.
        max_model_len: tokens a request may reach.
        notes: what was chosen, and why, in sentences.
    """

    num_blocks: int
    max_model_len: int
    notes: tuple[str, ...]


def choose(
    config: Config,
    cache: type[KVCache],
    spec: KVCacheSpec,
    options: Any,
    model_len: int,
    peak_bytes: Callable[[], int],
) -> Capacity:
    """Decide on the number of blocks.

    Args:
        config: `kv_blocks`, `kv_memory` and `max_model_len` are honoured.
        cache: the cache's class, and `options` its options. spec: all but `num_blocks` is used.
        model_len: positions the model was made for.
        peak_bytes: runs the largest step and returns what it took beyond the weights; called on a GPU if needed.

    Raises:
        CapacityError: the cache could not hold one request of the length that was asked for.
    """
    slots, block_bytes = cache.block_slots(spec, options), cache.block_bytes(spec, options)
    wanted = config.max_model_len or model_len
    useful = config.max_num_seqs * -(-wanted // slots)
    if config.kv_blocks is not None:
        blocks, why = config.kv_blocks, "as set by kv_blocks"
    elif config.kv_memory is not None:
        blocks, why = parse_bytes(config.kv_memory) // block_bytes, f"as set by kv_memory={config.kv_memory}"
    else:
        memory, why = _free_memory(spec.device, peak_bytes)
        blocks = memory // block_bytes
        if blocks > useful:
            blocks, why = useful, f"all that {config.max_num_seqs} requests of {wanted:,} tokens can use"
    tokens = blocks * slots
    longest, notes = _longest(config, wanted, tokens)
    size = _show(blocks * block_bytes)
    notes = (f"KV cache: {blocks:,} blocks of {slots} slots, {tokens:,} tokens, {size} ({why})", *notes)
    return Capacity(blocks + 1, longest, notes)


def _longest(config: Config, wanted: int, tokens: int) -> tuple[int, tuple[str, ...]]:
    if tokens < 1:
        raise CapacityError("the KV cache has no room for a single block: raise kv_memory or kv_blocks")
    if wanted <= tokens + 1:  # the last token needs no slot
        return wanted, ()
    if config.kv_blocks is not None:  # set by hand: a small pool is meant
        return wanted, (
            f"One request may take {wanted:,} tokens and the KV cache holds {tokens:,}: a longer prompt is refused, "
            'and a request that outgrows the cache ends as "kv_capacity"',
        )
    if config.max_model_len is not None:
        raise CapacityError(
            f"the KV cache holds {tokens:,} tokens, too few for one request of max_model_len={wanted:,}: "
            f"raise kv_memory, or set max_model_len to {tokens:,} or less"
        )
    return tokens, (
        f"The model takes {wanted:,} tokens and the KV cache holds {tokens:,}: requests are limited to {tokens:,} "
        "(set kv_memory or max_model_len to choose otherwise)",
    )


def _free_memory(device: torch.device, peak_bytes: Callable[[], int]) -> tuple[int, str]:
    if device.type != "cuda":
        return int(_available() * CPU_SHARE), f"{CPU_SHARE:.0%} of the memory that is free"
    peak = peak_bytes()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    memory = int(total * GPU_SHARE) - (total - free) - peak
    if memory <= 0:
        raise CapacityError(
            f"no memory is left for the KV cache: of {_show(total)}, {_show(total - free)} are in use and a step takes "
            f"{_show(peak)}; lower max_batch_tokens, or set kv_memory"
        )
    return memory, f"{GPU_SHARE:.0%} of the GPU less {_show(total - free)} in use and {_show(peak)} for a step"


def _available() -> int:
    """Bytes of memory that programs may still take."""
    try:
        import psutil
    except ImportError as error:
        raise CapacityError(
            "psutil, which knows how much memory is free, is missing: set kv_memory or kv_blocks"
        ) from error
    return int(psutil.virtual_memory().available)


def _show(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.1f} {unit}" if unit != "B" else f"{int(size)} B"
