"""The requests of a step one after another: batch invariance by construction, and slow.

A matrix product of 8 rows takes other routes than one of 1 row, and rounds otherwise (Thinking Machines, "Defeating
Nondeterminism in LLM Inference", 2025). Here each request goes through the model by itself, so whoever shares the step,
its numbers come from the same operations on the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from nanofw.attention import Attention
from nanofw.batch import Batch


def one_by_one(
    forward: Callable[[Batch], torch.Tensor], batch: Batch, attention: Attention, block_size: int
) -> torch.Tensor:
    """What `forward` makes of each request of `batch` alone, put together: logits `[B, V]`, or more where more are due.

    Args:
        forward: from a step to the logits of its `logits_indices`.
        batch: the step. attention: plans each request's part of it. block_size: of the cache.
    """
    ends = batch.query_lens_host.cumsum().tolist()
    asked = [[end - 1] for end in ends]
    for at in batch.logits_indices[batch.num_requests :].tolist():  # prompt tokens whose logits are wanted too
        asked[next(i for i, end in enumerate(ends) if at < end)].append(at)
    parts = []
    for index, end in enumerate(ends):
        part = _alone(batch, index, end, asked[index], block_size)
        parts.append(forward(part.with_plan(attention.plan(part))))
    logits = torch.cat([part[:1] for part in parts])
    return torch.cat((logits, *(part[1:] for part in parts)))


def _alone(batch: Batch, index: int, end: int, asked: list[int], block_size: int) -> Batch:
    """The step of one request, whose tokens end at `end`, as it is when nobody else is there."""
    query_len, seq_len = int(batch.query_lens_host[index]), int(batch.seq_lens_host[index])
    start, device = end - query_len, batch.token_ids.device
    return replace(
        batch,
        token_ids=batch.token_ids[start:end],
        positions=batch.positions[start:end],
        slot_mapping=batch.slot_mapping[start:end],
        cu_seqlens_q=torch.tensor([0, query_len], dtype=torch.int32, device=device),
        seq_lens=batch.seq_lens[index : index + 1],
        block_table=batch.block_table[index : index + 1, : -(-seq_len // block_size)],
        logits_indices=torch.tensor([at - start for at in asked], dtype=torch.int64, device=device),
        max_query_len=query_len,
        max_seq_len=seq_len,
        query_lens_host=batch.query_lens_host[index : index + 1],
        seq_lens_host=batch.seq_lens_host[index : index + 1],
        num_padding=int(index >= batch.num_requests - batch.num_padding),
        plan=None,
    )
