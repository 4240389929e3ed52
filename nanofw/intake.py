"""What is asked of an engine: checked at the door, then made into a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanofw.errors import RequestError
from nanofw.request import FinishReason, Request, SamplingParams
from nanofw.text import Detokenizer

if TYPE_CHECKING:
    from nanofw.engine import Engine


def check(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """Whether a request could be served. Raises: RequestError that says why not."""
    size, capacity = len(prompt_ids), engine.kv_cache.capacity
    if not size:
        raise RequestError("the prompt has no tokens; it needs at least one")
    if min(prompt_ids) < 0 or max(prompt_ids) >= engine.vocab_size:
        wrong = next(i for i in prompt_ids if not 0 <= i < engine.vocab_size)
        raise RequestError(f"the prompt holds token id {wrong}; the model's ids are 0 to {engine.vocab_size - 1}")
    if size >= engine.max_model_len:
        raise RequestError(
            f"the prompt has {size} tokens; at a length limit of {engine.max_model_len} (prompt and output together) "
            f"it may have at most {engine.max_model_len - 1}"
        )
    if size > capacity:
        raise RequestError(
            f"the prompt has {size} tokens and the whole KV cache holds {capacity}; it can never run: shorten it, "
            "or give the cache more blocks (kv_blocks) or memory (kv_memory)"
        )
    if params.stop and engine.tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")


def make(
    engine: Engine,
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    number: int,
    prompt: str | None,
    stream: bool,
) -> Request:
    """A request that has been checked: its first sample, with the others unborn.

    Args:
        engine, request_id, prompt_ids, params, prompt, stream: as for `Engine.add`.
        number: of requests and further samples that came before it.
    """
    limit, reason = _limit(engine, len(prompt_ids), params)
    seed = params.seed if params.seed is not None else (engine.seed << 32) + number
    samples = [
        Request(
            id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=_signed(seed + index),
            limit=limit,
            limit_reason=reason,
            stop_ids=(() if params.ignore_eos else engine.eos_token_ids) + tuple(params.stop_token_ids),
            prompt=prompt,
            stream=stream,
            number=number + index,
            index=index,
        )
        for index in range(params.n)
    ]
    for sample in samples:
        if engine.tokenizer is not None:
            sample.detokenizer = Detokenizer(engine.tokenizer, params.stop, params.skip_special_tokens)
        if params.n > 1:
            sample.samples = samples
    leader, *leader.unborn = samples
    return leader


def _limit(engine: Engine, prompt_len: int, params: SamplingParams) -> tuple[int, FinishReason]:
    """Most tokens the request may reach, and what sets that bound. The last token needs no slot in the cache."""
    bounds: list[tuple[int, FinishReason]] = [
        (prompt_len + params.max_tokens, "length"),
        (engine.max_model_len, "context"),
        (engine.kv_cache.capacity + 1, "kv_capacity"),
    ]
    return min(bounds, key=lambda bound: bound[0])


def _signed(seed: int) -> int:
    """Any integer as the int64 with the same low 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
